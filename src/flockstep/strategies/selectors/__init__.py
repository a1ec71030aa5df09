"""Selectors, which decide which parameters are averaged in a step that averages only a part of the parameters."""
