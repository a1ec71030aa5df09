"""Closed-form costs of training, computed from the shapes of layers and models, from clusters and links, and from the
step of a strategy.
"""
