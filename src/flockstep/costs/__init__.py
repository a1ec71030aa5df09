"""Costs of training in closed form: layers and models by shape, clusters, links, and a strategy's step."""
