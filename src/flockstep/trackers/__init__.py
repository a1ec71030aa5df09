"""Experiment trackers that show the curves of a run."""
