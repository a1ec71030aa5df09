"""Measurements of what moves arrays, beside what else could: in turn, in one run, on this machine."""
