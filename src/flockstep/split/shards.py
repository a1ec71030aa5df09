"""The interface between drivers and frameworks for a model whose parameters are stored in shards on several workers, or
whose parts are each stored in shards.

A unit is some consecutive layers whose parameters are gathered together (a FlatParameter of PyTorch's FSDP). Each way,
that is, each of the workers that share a replica, holds a shard of every unit, and computes all units on its share of
the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError
from flockstep.partitions.sharded import Sharded, ShardedParts
from flockstep.split.stages import HeldPart, PipelineModel, SplitModel


class ModelShard(HeldPart):
    """The part of a sharded model that one worker of a replica stores: a shard of every unit. A model with changing
    buffers is never stored in shards.
    """

    def __init__(self, schema: Schema, train_size: int, units: Sequence[HeldPart], spans: Sequence[slice]):
        """`schema`: tensors, and parts of tensors, in the shards. `units`: units of the model, or the part of a split
        model whose shard this is. `spans`: elements of the shard in the flat array of each unit.
        """
        self.schema, self.train_size = schema, train_size
        self.spans = spans
        sizes = [span.stop - span.start for span in spans]
        self.places = [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
        """The elements of each unit's shard in the flat array (K,) of this part."""
        self._units = units
        self.held_bytes = schema.nbytes + sum(unit.held_bytes - unit.schema.nbytes for unit in units)

    @property
    def kept(self) -> int:
        return sum(unit.kept for unit in self._units)

    def initial(self) -> FlatArray:
        return np.concatenate([unit.initial()[span] for unit, span in zip(self._units, self.spans, strict=True)])

    def values(self) -> npt.NDArray[np.uint8]:
        """Return the bytes of the initial parameters of the shards, followed by the tensors of each unit that every
        worker of a replica holds whole: frozen parameters and buffers.
        """
        others = [unit.values()[unit.schema.nbytes :] for unit in self._units]
        return np.concatenate([self.initial().view(np.uint8), *others])

    def take(self, values: npt.NDArray[np.uint8]) -> FlatArray:
        if len(values) != self.held_bytes:
            raise ConfigurationError(
                f"the values of a shard must have {self.held_bytes} bytes, got {len(values)}; build the same model in "
                "every process"
            )
        start = self.schema.nbytes
        for unit in self._units:
            trained, others = unit.schema.nbytes, unit.held_bytes - unit.schema.nbytes
            if others:
                unit.take(np.concatenate([np.zeros(trained, np.uint8), values[start : start + others]]))
            start += others
        params: FlatArray = values[: self.schema.nbytes].copy().view(self.schema.dtype)
        return params


@dataclass(frozen=True, eq=False)
class ShardedModel(SplitModel):
    """A job whose parameters are stored in shards on the workers of each replica."""

    parts: tuple[ModelShard, ...]
    partition: Sharded
    inner: PipelineModel
    """The units, as the stages of a pipeline."""

    @property
    def microbatches(self) -> int:
        return self.partition.ways

    def largest_message(self, batch: int) -> int:
        """Return the size in bytes of the largest unit, because some collectives send whole units."""
        return max(unit.schema.nbytes for unit in self.inner.parts)


@dataclass(frozen=True, eq=False)
class ShardedPartsModel(SplitModel):
    """A job whose model is split into parts, each of which is stored in shards on several workers.

    Shard w of part p is part p W + w, for W shards.
    """

    parts: tuple[ModelShard, ...]
    partition: ShardedParts
    inner: SplitModel
    """The model in whole parts."""

    @property
    def microbatches(self) -> int:
        return self.inner.microbatches * self.partition.sharded.ways

    @property
    def note(self) -> str | None:
        return self.inner.note

    def largest_message(self, batch: int) -> int:
        """Return the bytes of the largest array that parts send; some collectives send a whole part."""
        share = -(-batch // self.partition.sharded.ways)
        return max(self.inner.largest_message(share), *(part.schema.nbytes for part in self.inner.parts))
