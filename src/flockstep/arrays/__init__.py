"""The flat array of a model: one contiguous buffer, and the schema that locates the tensors in it."""

from flockstep.arrays.schema import Entry, Schema, slices

__all__ = ["Entry", "Schema", "slices"]
