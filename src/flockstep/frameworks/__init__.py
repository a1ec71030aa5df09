"""Gradients and evaluations of a model, for each framework that models are written in."""
