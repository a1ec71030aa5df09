"""Gradients and evaluations of a model, whoever wrote it."""
