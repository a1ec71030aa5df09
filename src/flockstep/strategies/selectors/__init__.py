"""Selectors, which decide which parameters are averaged if only a few of them are."""
