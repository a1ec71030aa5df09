"""Experiment trackers, such as TensorBoard and MLflow, which show the curves of a run."""
