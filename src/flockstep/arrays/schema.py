"""What lies where in a model's flat array."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError, SchemaMismatch

FlatArray = npt.NDArray[Any]
"""A numpy array, or a torch tensor on whatever device; what is no operator comes from its `namespace`."""

DTYPES = ("float16", "float32", "float64")


@dataclass(frozen=True)
class Entry:
    """One named tensor inside the flat array; offset and size in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Schema:
    """The table of a model's trainable tensors, in order, without gaps, all of one dtype."""

    dtype: str
    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], dtype: str = "float32") -> Schema:
        """The schema of tensors laid out one after the other.

        Raises:
            ConfigurationError: no tensor at all, or a dtype that is not one of `DTYPES`.
        """
        if dtype not in DTYPES:
            raise ConfigurationError(f"parameters must be one of {', '.join(DTYPES)}, got {dtype}; convert the model")
        if not shapes:
            raise ConfigurationError("the model has no trainable parameter; set requires_grad on at least one")
        entries, offset = [], 0
        for name, shape in shapes.items():
            entries.append(Entry(name, tuple(map(int, shape)), offset))
            offset += entries[-1].size
        return cls(dtype, tuple(entries))

    @cached_property
    def size(self) -> int:
        """Number of elements in the flat array (K in the literature)."""
        return sum(entry.size for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the flat array."""
        return self.size * np.dtype(self.dtype).itemsize

    @cached_property
    def slices(self) -> tuple[slice, ...]:
        """Where each tensor lies in the flat array."""
        return tuple(slice(entry.offset, entry.offset + entry.size) for entry in self.entries)

    @cached_property
    def hash(self) -> str:
        """16 hexadecimal digits that two models share only if their tables are equal."""
        rows = [f"{e.name}:{'x'.join(map(str, e.shape))}@{e.offset}" for e in self.entries]
        return hashlib.sha256("\n".join([self.dtype, *rows]).encode()).hexdigest()[:16]

    @lru_cache(maxsize=1024)  # noqa: B019 - schemas are few, and live as long as their run
    def shapes_within(self, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors that elements start..stop-1 hold, in order; of one that is cut, a flat piece."""
        shapes: list[tuple[int, ...]] = []
        for entry in self.entries:
            first, last = max(start, entry.offset), min(stop, entry.offset + entry.size)
            if first < last:
                shapes.append(entry.shape if last - first == entry.size else (last - first,))
        return tuple(shapes)

    def views(self, flat: FlatArray) -> dict[str, FlatArray]:
        """Name → view of `flat` in that tensor's shape."""
        return {e.name: flat[e.offset : e.offset + e.size].reshape(e.shape) for e in self.entries}

    def require(self, other: Schema, who: str) -> None:
        """Raise `SchemaMismatch`, naming the first difference, unless `other` is equal."""
        if self.hash == other.hash:
            return
        mine = [self.dtype, *((e.name, e.shape) for e in self.entries)]
        theirs = [other.dtype, *((e.name, e.shape) for e in other.entries)]
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                raise SchemaMismatch(
                    f"the model of {who} differs: {b} where others have {a}; build the same model on every worker"
                )
        raise SchemaMismatch(
            f"the model of {who} has {len(theirs) - 1} tensors where others have {len(mine) - 1}; "
            "build the same model on every worker"
        )


def slices(size: int, parts: int) -> list[slice]:
    """`parts` contiguous slices that cover range(size) exactly, their lengths differing by at most one."""
    base, extra = divmod(size, parts)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + base + (part < extra))
    return [slice(a, b) for a, b in pairwise(bounds)]
