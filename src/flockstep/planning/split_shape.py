"""A split model as a rehearsal needs it: the sizes and the work of its parts, and its surrogate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.codecs.base import Shape
from flockstep.drivers.part_group import PartGroup, groups_of
from flockstep.frameworks.stages import HeldPart, MicroBatch, SplitModel
from flockstep.partitions.base import Partition
from flockstep.planning.surrogate import SurrogateEngine

FINEST = 8
"""Smallest number of elements in a surrogate for the activations of a micro-batch, so that rounding to whole elements
has little effect.
"""
LARGEST = 65536
"""Largest number of parameters to which a surrogate is enlarged so that activations have `FINEST` elements."""
SLIGHT = 16
"""Factor by which an array between parts must be smaller than the largest such array to be exempt from `FINEST`."""


@dataclass(frozen=True)
class SplitShape(ABC):
    """A model that is split by a partition, together with the number of samples in a batch."""

    partition: Partition
    batch: int
    layers: tuple[str, ...]
    """The layers of each part, as text."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Shape, ...]:
        """Shapes of all tensors, part by part."""

    @abstractmethod
    def passed(self) -> Sequence[float]:
        """Return the number of elements of each array of activations between parts, for one micro-batch."""

    @abstractmethod
    def elements_held(self, slots: int) -> float:
        """Return the number of elements in the memory of the worker that needs the most: parameters, their copies,
        gradient, `slots` arrays of the optimizer, and activations.
        """

    @abstractmethod
    def model(self, engine: SurrogateEngine) -> SplitModel:
        """Return the surrogate `engine`, whose tensors have the shapes of this model, in parts."""

    @property
    def parameters(self) -> int:
        """Number of trained parameters of the whole model."""
        return sum(map(math.prod, self.tensors))

    def elements(self, least: int) -> int:
        """Return the number of parameters of the surrogate that stands for this model in rehearsals: at least `least`,
        and more if activations would otherwise have only a few elements.
        """
        sizes = [one for one in self.passed() if one]
        smallest = min((one for one in sizes if SLIGHT * one >= max(sizes)), default=0.0)
        return max(least, min(LARGEST, math.ceil(FINEST * self.parameters / smallest))) if smallest else least


class SurrogateHeld(HeldPart):
    """Base class of the surrogates of all parts, which have elements of an engine's flat array, and no buffers."""

    def __init__(self, engine: SurrogateEngine, schema: Schema, span: slice):
        """`span`: the elements of the part in the flat array of `engine`."""
        self.schema = schema
        self.held_bytes = schema.nbytes
        self.train_size = engine.train_size
        self._engine, self._span = engine, span
        self._kept: dict[tuple[int, int, int, int], FlatArray] = {}
        """Replica, step, micro-batch and chunk → parameters of a forward pass whose backward pass is not complete."""

    @property
    def kept(self) -> int:
        return len(self._kept)

    def buffers(self, replica: int) -> FlatArray:
        return np.empty(0)

    def restore_buffers(self, replica: int, values: FlatArray) -> None:
        """Do nothing, because a surrogate has no buffers."""

    def values(self) -> npt.NDArray[np.uint8]:
        return self.initial().view(np.uint8)

    def take(self, values: npt.NDArray[np.uint8]) -> FlatArray:
        params: FlatArray = values.copy().view(self.schema.dtype)
        return params

    def initial(self) -> FlatArray:
        return self._engine.initial()[self._span]

    def keep(self, chunk: int, batch: MicroBatch, params: FlatArray) -> None:
        """Begin a pass over a chunk with the given parameters (K,)."""
        self._kept[batch.replica, batch.step, batch.number, chunk] = params

    def add_gradient(self, chunk: int, batch: MicroBatch, out: FlatArray) -> None:
        """End a pass over a chunk; the pass over chunk 0 adds the gradient of all parameters to `out` (K,)."""
        params = self._kept.pop((batch.replica, batch.step, batch.number, chunk))
        if chunk == 0:
            out += batch.share * self._engine.slopes[self._span] * params

    def activations(self, elements: float) -> FlatArray:
        """Return an array that stands for `elements` elements of activations, or of their gradients."""
        return np.full(max(1, round(elements / self._engine.factor)), 1e-3, self._engine.schema.dtype)


def groups_by_tensors(engine: SurrogateEngine, counts: Sequence[int]) -> list[PartGroup]:
    """Return the parts of a surrogate, each with the given number of the engine's tensors, in order."""
    entries, sizes = list(engine.schema.entries), []
    for count in counts:
        sizes.append(sum(entry.size for entry in entries[:count]))
        del entries[:count]
    return groups_of(sizes, 0)
