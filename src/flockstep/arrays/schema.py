"""The layout of a model's flat array: names, shapes and offsets of its tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import FLOATS
from flockstep.errors import ConfigurationError, SchemaMismatch

FlatArray = npt.NDArray[Any]
"""A flat array: a numpy array, or a torch tensor on any device. Functions for it come from its `namespace`."""

DTYPES = ("float16", "float32", "float64")
"""Names of the dtypes that a flat array may have."""


@dataclass(frozen=True)
class Entry:
    """One named tensor inside the flat array; offset and size in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    dtype: str = ""
    """Name of the parameter's dtype if that dtype is narrower than the flat array's dtype, otherwise ""."""

    @property
    def size(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Schema:
    """The layout of a model's trainable tensors, in order, without gaps; `dtype` is the dtype of the flat array."""

    dtype: str
    entries: tuple[Entry, ...]

    def __post_init__(self) -> None:
        offset = 0
        for entry in self.entries:
            if entry.offset != offset or any(length < 0 for length in entry.shape):
                raise ConfigurationError(
                    f"tensors must lie one after another, got {entry.name!r} of shape {entry.shape} at offset "
                    f"{entry.offset} instead of {offset}; use Schema.of"
                )
            offset += entry.size
        if self.dtype not in DTYPES:
            raise ConfigurationError(
                f"the dtype of a flat array must be one of {', '.join(DTYPES)}, got {self.dtype!r}; use Schema.of"
            )

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], dtype: str | Mapping[str, str] = "float32") -> Schema:
        """Return the schema of tensors laid out one after another.

        For parameters of several dtypes the flat array has the widest of them; for bfloat16, which numpy lacks, it has
        float32 or float64.

        Args:
            shapes: name → shape of each parameter.
            dtype: the dtype of the flat array, or name → dtype of each parameter.

        Raises:
            ConfigurationError: there is no tensor, or a dtype is not supported.
        """
        known = DTYPES if isinstance(dtype, str) else FLOATS
        dtypes = dict.fromkeys(shapes, dtype) if isinstance(dtype, str) else dtype
        for name, kind in dtypes.items():
            if kind not in known:
                raise ConfigurationError(
                    f"the dtype of parameter {name!r} must be one of {', '.join(known)}, got {kind}; convert the "
                    "model, for example with module.float()"
                )
        if not shapes:
            raise ConfigurationError(
                "the model has no trainable parameter; set requires_grad on at least one parameter"
            )
        whole, entries, offset = _widest(set(dtypes.values())), list[Entry](), 0
        for name, shape in shapes.items():
            narrow = dtypes[name] if dtypes[name] != whole else ""
            entries.append(Entry(name, tuple(map(int, shape)), offset, narrow))
            offset += entries[-1].size
        return cls(whole, tuple(entries))

    def only(self, names: Container[str]) -> Schema:
        """Return the schema of the tensors with the given names alone."""
        entries, offset = list[Entry](), 0
        for entry in self.entries:
            if entry.name in names:
                entries.append(replace(entry, offset=offset))
                offset += entry.size
        return Schema(self.dtype, tuple(entries))

    @cached_property
    def size(self) -> int:
        """Number of elements in the flat array (K in the literature)."""
        return sum(entry.size for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the flat array."""
        return self.size * np.dtype(self.dtype).itemsize

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """The slice of each tensor in the flat array."""
        return tuple(slice(entry.offset, entry.offset + entry.size) for entry in self.entries)

    @cached_property
    def hash(self) -> str:
        """Hash of the schema as 16 hexadecimal digits; two models share the hash only if their schemas are equal."""
        rows = [f"{e.name}:{'x'.join(map(str, e.shape))}@{e.offset}{e.dtype and ' ' + e.dtype}" for e in self.entries]
        return hashlib.sha256("\n".join([self.dtype, *rows]).encode()).hexdigest()[:16]

    @lru_cache(maxsize=1024)  # noqa: B019 - schemas are few, and live as long as their run
    def shapes_within(self, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors in elements start to stop-1 of the flat array, in order. A tensor that lies
        only partly in this range gets a flat shape.
        """
        shapes: list[tuple[int, ...]] = []
        for entry in self.entries:
            first, last = max(start, entry.offset), min(stop, entry.offset + entry.size)
            if first < last:
                shapes.append(entry.shape if last - first == entry.size else (last - first,))
        return tuple(shapes)

    def views(self, flat: FlatArray) -> dict[str, FlatArray]:
        """Return a mapping: name of each tensor → view of the tensor in `flat`, in the tensor's shape."""
        return {e.name: flat[e.offset : e.offset + e.size].reshape(e.shape) for e in self.entries}

    def require(self, other: Schema, who: str) -> None:
        """Check that the schema `other` equals this schema.

        Raises:
            SchemaMismatch: the schemas differ; the message names the first difference.
        """
        if self.hash == other.hash:
            return
        mine, theirs = ([each.dtype, *map(_described, each.entries)] for each in (self, other))
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                raise SchemaMismatch(
                    f"the model of {who} differs from the models of other workers: {b} instead of {a}; build the same "
                    "model on every worker"
                )
        raise SchemaMismatch(
            f"the model of {who} has {len(theirs) - 1} tensors, but the models of other workers have {len(mine) - 1}; "
            "build the same model on every worker"
        )


def _widest(dtypes: set[str]) -> str:
    """Return the dtype of a flat array for parameters of the given dtypes."""
    if "float64" in dtypes:
        return "float64"
    return "float16" if dtypes == {"float16"} else "float32"


def _described(entry: Entry) -> tuple[Any, ...]:
    """Return the properties of a tensor that two models must agree on."""
    return (entry.name, entry.shape, entry.dtype) if entry.dtype else (entry.name, entry.shape)


def slices(size: int, parts: int) -> list[slice]:
    """Return `parts` contiguous slices that cover range(size) exactly, with lengths that differ by at most one."""
    base, extra = divmod(size, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < extra))
    return [slice(a, b) for a, b in pairwise(bounds)]
