"""Launchers, which start a script or a job on many workers and supervise the run."""
