"""How a server applies the gradients that its consistency rule has released."""
