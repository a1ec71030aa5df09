"""Primitives for numpy arrays. One group of kernels, one file."""

from __future__ import annotations

from flockstep.arrays.kernels.numpy_basics import as_bytes, as_floats, cast, first_not_finite, from_bytes, join

__all__ = ["as_bytes", "as_floats", "cast", "first_not_finite", "from_bytes", "join"]
