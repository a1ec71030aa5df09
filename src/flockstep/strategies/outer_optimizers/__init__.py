"""Outer optimizers, which compute the next common model from the mean of the replicas."""
