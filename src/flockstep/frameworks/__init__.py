"""Gradients and evaluations of models, for each supported framework."""
