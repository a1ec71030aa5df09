"""Transports: how messages move between the nodes of a run."""
