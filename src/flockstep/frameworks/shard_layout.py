"""Which elements of whole tensors a process of a replica holds, and how values move to processes that hold others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flockstep.arrays.schema import Entry, FlatArray, Schema
from flockstep.errors import SchemaMismatch


@dataclass(frozen=True)
class Box:
    """Where the part of a tensor that a process holds begins in the whole tensor."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Index of the part's first element along each dimension."""


@dataclass(frozen=True)
class ShardLayout:
    """The elements of a model that one process of a replica trains."""

    schema: Schema
    """Names and shapes of the process's parts of the tensors."""
    boxes: tuple[Box, ...]
    """Place of each part in its whole tensor."""
    model: tuple[str, ...]
    """Names of all tensors of the model, also of those that other processes train."""
    order: tuple[int, ...]
    """Index in `schema` of each parameter of the optimizer, in the order of its groups; -1: not trained here."""

    def pieces(self, other: ShardLayout) -> Iterator[tuple[Entry, tuple[slice, ...], Entry, tuple[slice, ...]]]:
        """Yield the elements of each tensor that two processes both hold: this process's part and the elements within
        it, and the other's.

        Raises:
            SchemaMismatch: the models differ.
        """
        if self.model != other.model:
            raise SchemaMismatch(f"its tensors are {', '.join(other.model)} instead of {', '.join(self.model)}")
        theirs = {entry.name: (entry, box) for entry, box in zip(other.schema.entries, other.boxes, strict=True)}
        for mine, here in zip(self.schema.entries, self.boxes, strict=True):
            if mine.name not in theirs:
                continue
            yours, there = theirs[mine.name]
            if here.whole != there.whole:
                raise SchemaMismatch(f"{mine.name} has shape {there.whole} instead of {here.whole}")
            spans = [
                (max(a, b), min(a + m, b + n))
                for a, m, b, n in zip(here.offsets, mine.shape, there.offsets, yours.shape, strict=True)
            ]
            if all(first < last for first, last in spans):
                own, others = (
                    tuple(slice(a - o, b - o) for (a, b), o in zip(spans, box.offsets, strict=True))
                    for box in (here, there)
                )
                yield mine, own, yours, others

    def copy(self, target: FlatArray, source: FlatArray, of: ShardLayout) -> None:
        """Copy the common elements of an array (…, K) of a process with the layout `of` to an array of this process."""
        for mine, own, yours, theirs in self.pieces(of):
            _view(target, mine)[..., *own] = _view(source, yours)[..., *theirs]


def _view(flat: Any, entry: Entry) -> Any:
    return flat[..., entry.offset : entry.offset + entry.size].reshape((*flat.shape[:-1], *entry.shape))
