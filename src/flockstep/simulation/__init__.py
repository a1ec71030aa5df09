"""Virtual time: the event queue, and models of computing and of the network."""
