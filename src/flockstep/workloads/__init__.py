"""The built-in training jobs, and how their data is split over workers."""
