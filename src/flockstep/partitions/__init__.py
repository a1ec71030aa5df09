"""Partitions: how one replica of the model is split over several workers."""
