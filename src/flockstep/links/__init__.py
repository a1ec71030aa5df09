"""Transports, which move messages between the nodes of a run."""
