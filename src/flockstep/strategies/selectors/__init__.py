"""Selectors: which parameters are averaged if only a few are."""
