"""Primitives for torch tensors, on whatever device they lie. One group of kernels, one file."""

from __future__ import annotations

from flockstep.arrays.kernels.torch_basics import as_bytes, as_floats, cast, first_not_finite, from_bytes, join

__all__ = ["as_bytes", "as_floats", "cast", "first_not_finite", "from_bytes", "join"]
