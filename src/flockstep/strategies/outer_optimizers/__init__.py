"""Outer optimizers: how the mean of the replicas becomes the next model."""
