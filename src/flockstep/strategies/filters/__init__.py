"""Filters: which entries of an update a worker sends, and how a push identifies the entries."""
