"""Outer optimizers, which compute the next model from the mean of the replicas."""
