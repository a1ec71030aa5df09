"""Server updates: how a server applies the gradients that its consistency rule releases."""
