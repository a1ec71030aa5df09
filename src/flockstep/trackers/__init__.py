"""Experiment trackers, which show the curves of a run."""
