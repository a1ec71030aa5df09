"""Published results, and programs that reproduce them with flockstep."""
