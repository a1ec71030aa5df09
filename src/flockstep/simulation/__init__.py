"""Virtual time: the event queue, compute models, network models and faults."""
