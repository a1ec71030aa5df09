"""Closed-form costs of training: layers and models by their shapes, clusters, links, and the step of a strategy."""
