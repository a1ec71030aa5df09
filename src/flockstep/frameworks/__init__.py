"""Computes gradients and evaluations of models, with one engine for each supported framework."""
