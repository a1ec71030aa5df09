"""The interface between drivers and frameworks for a model whose layers are divided into rectangles on a grid of
workers.

A plane is the height × width of the outputs of a layer for one sample. Each worker of a replica holds a rectangle of
every plane; between two layers the workers exchange the parts of rectangles that other workers read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from flockstep.arrays.schema import FlatArray, slices
from flockstep.partitions.grid import SpatialGrid
from flockstep.split.stages import PipelineModel


@dataclass(frozen=True)
class PlaneRectangle:
    """A rectangle of places of a plane: rows `top` to `bottom` - 1, columns `left` to `right` - 1."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in places; 0 if the rectangle is empty."""
        return max(0, self.bottom - self.top), max(0, self.right - self.left)

    @property
    def places(self) -> int:
        """Number of places of the rectangle."""
        return self.size[0] * self.size[1]

    @property
    def slices(self) -> tuple[slice, slice]:
        """Slices of the rectangle in an array (height, width) of the whole plane."""
        return slice(self.top, self.bottom), slice(self.left, self.right)

    def overlap(self, other: PlaneRectangle) -> PlaneRectangle:
        """Return the places that two rectangles have in common."""
        return PlaneRectangle(
            max(self.top, other.top),
            min(self.bottom, other.bottom),
            max(self.left, other.left),
            min(self.right, other.right),
        )

    def of(self, array: FlatArray, held: PlaneRectangle) -> FlatArray:
        """Return the view of this rectangle in `array` (…, height, width), which has the places of `held`."""
        rows = slice(self.top - held.top, self.bottom - held.top)
        view: FlatArray = array[..., rows, self.left - held.left : self.right - held.left]
        return view


NOWHERE = PlaneRectangle(0, 0, 0, 0)
"""The empty rectangle."""
SINGLE = PlaneRectangle(0, 1, 0, 1)
"""The only place of a plane of 1 × 1 places."""


def rectangles(size: tuple[int, int], grid: SpatialGrid) -> tuple[PlaneRectangle, ...]:
    """Return the rectangle of each worker of a grid, row by row, for a plane of the given height and width."""
    pairs = product(slices(size[0], grid.rows), slices(size[1], grid.columns))
    return tuple(PlaneRectangle(rows.start, rows.stop, columns.start, columns.stop) for rows, columns in pairs)


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

    def sent(self, part: int) -> dict[int, PlaneRectangle]:
        """Return worker → places that worker `part` sends this worker in the forward pass."""
        return self._shared(part, [self.held[part].overlap(one) for one in self.needed])

    def fetched(self, part: int) -> dict[int, PlaneRectangle]:
        """Return worker → places that worker `part` gets from this worker in the forward pass."""
        return self._shared(part, [self.needed[part].overlap(one) for one in self.held])

    def fetched_elements(self, part: int) -> int:
        """Return the number of activations that worker `part` fetches for one sample."""
        return self.channels * sum(one.places for one in self.fetched(part).values())

    @property
    def largest(self) -> int:
        """Number of activations of the largest message, for one sample."""
        return self.channels * max(
            (one.places for part in range(len(self.held)) for one in self.sent(part).values()), default=0
        )

    def pieces(self, part: int, outputs: FlatArray | None) -> dict[int, FlatArray]:
        """Return worker → what worker `part` sends it, of `outputs` (samples, channels, height, width)."""
        return {} if outputs is None else {to: one.of(outputs, self.held[part]) for to, one in self.sent(part).items()}

    def slopes(self, part: int, errors: FlatArray | None) -> dict[int, FlatArray]:
        """Return worker → what `part` sends back to it, of the gradients `errors` of its inputs."""
        return (
            {} if errors is None else {to: one.of(errors, self.needed[part]) for to, one in self.fetched(part).items()}
        )

    def inputs(self, part: int, outputs: FlatArray | None, arrived: Mapping[int, FlatArray]) -> FlatArray | None:
        """Return the inputs of worker `part`, from its own and arrived outputs; None if it computes no layer behind."""
        return self._filled(part, self.needed[part], self.held[part], outputs, arrived, self.fetched(part))

    def output_slopes(self, part: int, errors: FlatArray | None, arrived: Mapping[int, FlatArray]) -> FlatArray | None:
        """Return the gradient of the outputs of worker `part`: the sum of the gradients of its own inputs and of those
        that other workers sent back, in the order of the workers.
        """
        return self._filled(part, self.held[part], self.needed[part], errors, arrived, self.sent(part))

    def _shared(self, part: int, places: Sequence[PlaneRectangle]) -> dict[int, PlaneRectangle]:
        return {other: one for other, one in enumerate(places) if other != part and one.places}

    def _filled(
        self,
        part: int,
        wanted: PlaneRectangle,
        has: PlaneRectangle,
        own: FlatArray | None,
        arrived: Mapping[int, FlatArray],
        places: Mapping[int, PlaneRectangle],
    ) -> FlatArray | None:
        """An array of the places `wanted`: zeros, plus the worker's own array of the places `has`, plus arrivals."""
        like = next((one for one in (own, *arrived.values()) if one is not None), None)
        if like is None or not wanted.places:
            return None
        found = np.zeros((len(like), self.channels, *wanted.size), like.dtype)
        both = wanted.overlap(has)
        for other in range(len(self.held)):
            if other == part and own is not None and both.places:
                both.of(found, wanted)[...] += both.of(own, has)
            elif other in places:
                places[other].of(found, wanted)[...] += arrived[other]
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
