"""A model whose layers are divided into rectangles on a grid of workers (Coates et al. 2013): the interface between
drivers and frameworks, and the program of one worker.

A plane is the height × width of the outputs of a layer for one sample. Each worker of a replica holds a rectangle of
every plane; between two layers the workers exchange the parts of rectangles that other workers read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray, slices
from flockstep.messages import frozen
from flockstep.partitions.grid import SpatialGrid
from flockstep.partitions.pipeline_schedules import PipelinePass
from flockstep.split.program import PartRun
from flockstep.split.stage_program import TAGS, PipelineStage, StageNote
from flockstep.split.stages import MicroBatch, PipelineModel


@dataclass(frozen=True)
class PlaneRectangle:
    """A rectangle of places of a plane: rows and columns."""

    axes: tuple[range, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """Height and width in places; 0 if the rectangle is empty."""
        return tuple(map(len, self.axes))

    @property
    def places(self) -> int:
        """Number of places of the rectangle."""
        return math.prod(self.size)

    def overlap(self, other: PlaneRectangle) -> PlaneRectangle:
        """Return the places that two rectangles have in common."""
        pairs = zip(self.axes, other.axes, strict=True)
        return PlaneRectangle(tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs))

    def within(self, held: PlaneRectangle) -> tuple[Any, ...]:
        """Return the index of this rectangle in an array (…, height, width) of the places of `held`."""
        spans = zip(self.axes, held.axes, strict=True)
        return ..., *(slice(a.start - b.start, a.stop - b.start) for a, b in spans)


def whole_plane(size: Sequence[int]) -> PlaneRectangle:
    """Return the rectangle of all places of a plane of the given height and width."""
    return PlaneRectangle(tuple(map(range, size)))


NOWHERE = whole_plane((0, 0))
"""The empty rectangle."""


def rectangles(size: Sequence[int], grid: SpatialGrid) -> tuple[PlaneRectangle, ...]:
    """Return the rectangle of each worker of a grid, row by row, for a plane of the given height and width."""
    pairs = product(slices(size[0], grid.rows), slices(size[1], grid.columns))
    return tuple(PlaneRectangle(tuple(range(one.start, one.stop) for one in pair)) for pair in pairs)


@dataclass(frozen=True)
class HaloExchange:
    """The activations between two layers: each worker holds a rectangle of the plane, and needs another rectangle.

    If several workers hold a place, each of them holds a term of a sum.
    """

    held: tuple[PlaneRectangle, ...]
    """Places of each worker's outputs of the layer before."""
    needed: tuple[PlaneRectangle, ...]
    """Places of the inputs that each worker reads; empty for a worker that computes no further layer."""
    channels: int
    """Number of activations at each place, for one sample."""

    @property
    def back(self) -> HaloExchange:
        """The exchange of the backward pass, in which the gradients of an output's uses are the terms of a sum."""
        return HaloExchange(self.needed, self.held, self.channels)

    def sent(self, part: int) -> dict[int, PlaneRectangle]:
        """Return worker → places that worker `part` sends this worker."""
        shared = {other: self.held[part].overlap(one) for other, one in enumerate(self.needed) if other != part}
        return {other: one for other, one in shared.items() if one.places}

    @property
    def largest(self) -> int:
        """Number of activations of the largest message, for one sample."""
        sent = [one.places for part in range(len(self.held)) for one in self.sent(part).values()]
        return self.channels * max(sent, default=0)

    def inputs(self, part: int, outputs: FlatArray | None, arrived: Mapping[int, FlatArray]) -> FlatArray | None:
        """Return what worker `part` needs, from its own and arrived outputs (samples, channels, height, width), added
        in the order of the workers; None if it needs nothing.
        """
        wanted, known = self.needed[part], dict(arrived) | ({} if outputs is None else {part: outputs})
        if not known or not wanted.places:
            return None
        like = next(iter(known.values()))
        found = np.zeros((len(like), self.channels, *wanted.size), like.dtype)
        for other, one in sorted(known.items()):
            both = wanted.overlap(self.held[other])
            if both.places:
                piece = one[both.within(self.held[part])] if other == part else one
                found[both.within(wanted)] += piece
        return found


@dataclass(frozen=True, eq=False, kw_only=True)
class GridModel(PipelineModel):
    """A job whose model is divided into rectangles on a grid of workers.

    Chunk i + 1 of a part begins with the inputs of exchange i. Only part 0 has the chunk after the last exchange. A tie
    is a weight of a convolution, with which all parts compute and which one of them trains.
    """

    partition: SpatialGrid
    exchanges: Sequence[HaloExchange]

    @property
    def note(self) -> str | None:
        undivided = "; ".join(self.facts.undivided)
        return f"{self.partition} does not divide all layers: {undivided}." if undivided else None


class GridWay(PipelineStage):
    """The program of one worker of the grid that holds one replica."""

    def __init__(self, run: PartRun, model: GridModel):
        super().__init__(run, model.parts[run.number], model.pipeline, model.ties)
        self._exchanges = model.exchanges

    async def _outputs(
        self, work: PipelinePass, weights: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        given, loss = await super()._outputs(work, weights, batch, inputs)
        for number, exchange in enumerate(self._exchanges):
            given = await self._exchanged(exchange, replace(work, chunk=number), given)
            if number + 1 < len(self._part.shares):
                given, loss = await super()._outputs(replace(work, chunk=number + 1), weights, batch, given)
        return None, loss

    async def _slopes(self, work: PipelinePass, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        for number, exchange in reversed(list(enumerate(self._exchanges))):
            if number + 1 < len(self._part.shares):
                errors = await super()._slopes(replace(work, chunk=number + 1), batch, errors)
            errors = await self._exchanged(exchange.back, replace(work, chunk=number), errors)
        return await super()._slopes(work, batch, errors)

    async def _exchanged(self, exchange: HaloExchange, work: PipelinePass, array: FlatArray | None) -> FlatArray | None:
        """Send what other workers need of an array, and return what this worker needs."""
        tag, key = f"{TAGS[work.kind]} {work.chunk}", (work.step, work.microbatch)
        note = StageNote(*key, loss=self._own.get(key, 0.0))
        for other, places in exchange.sent(self.number).items():
            assert array is not None
            piece = array[places.within(exchange.held[self.number])]
            self._send(other, tag, frozen(piece).reshape(-1), note)
        arrived: dict[int, FlatArray] = {}
        for other, places in exchange.back.sent(self.number).items():
            message = await self._message(tag, other, *key)
            arrived[other] = message.payload.reshape(-1, exchange.channels, *places.size)
            self._own[key] = message.note.loss  # known behind the forward pass of the first worker
        return exchange.inputs(self.number, array, arrived)
