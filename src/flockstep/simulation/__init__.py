"""Virtual time: the event queue, compute models, network models and faults."""

USUAL_COMPUTE = "lognormal(mean=0.01)"
"""Default compute model of a simulation. It is random, because with equal durations every asynchronous update would be
exactly n-1 steps stale.
"""
USUAL_NETWORK = "1gbit"
"""Default network of a simulation, as an expression."""
