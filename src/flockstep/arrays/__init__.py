"""The flat array of a model: one contiguous buffer, and the table that says what lies where."""

from flockstep.arrays.schema import Entry, Schema, slices

__all__ = ["Entry", "Schema", "slices"]
