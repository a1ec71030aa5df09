"""The contract of an optimiser."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flockstep.arrays.namespace import cast, namespace, rounded
from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.expression import Component


@dataclass
class OptimizerState:
    """What an optimiser remembers between steps: a count, and named arrays as long as the parameters."""

    steps: float = 0
    """Full steps taken so far: the sum of their shares."""
    slots: dict[str, FlatArray] = field(default_factory=dict)
    tensors: tuple[slice, ...] = ()
    """Where each of the model's tensors lies; set by whoever holds a whole model, for optimisers that go by layers."""
    lr: float = 0.0
    """The learning rate of the last step, where an optimiser has to know it."""
    start: int = 0
    """Where in the model's flat array the parameters begin."""
    numbers: dict[str, float] = field(default_factory=dict)
    """What another library's optimiser remembers besides arrays, where it is handed out: "name:group" → value."""
    foreign: Any = None
    """What another library's optimiser remembers; it can only step all of the parameters at once."""


class Optimizer(Component):
    """An update rule; its fields are its hyper-parameters, `lr` always among them.

    Elementwise means that a slice of the parameters can be stepped on its own: a shard's result equals the
    same slice of the whole, bit for bit.
    """

    noun: ClassVar[str] = "optimizer"
    elementwise: ClassVar[bool] = True
    """Otherwise it needs `OptimizerState.tensors`, and nobody who holds only a slice can step with it."""
    lr: float

    @abstractmethod
    def init(self, params: FlatArray) -> OptimizerState:
        """A fresh state for `params`."""

    def load(self) -> None:
        """Import what steps need, so that nobody waits for that at the first step."""

    def init_slice(self, params: FlatArray, part: slice) -> OptimizerState:
        """A fresh state for a part of the model's parameters."""
        state = self.init(params[part])
        state.start = part.start
        return state

    def remembered(self, state: OptimizerState) -> OptimizerState:
        """What a checkpoint has to hold of `state`: steps, slots and numbers."""
        return state

    def recall(self, params: FlatArray, state: OptimizerState, given: OptimizerState) -> None:
        """Let `state`, that of `params`, remember what `given` holds, as `remembered` hands it out."""
        state.steps = given.steps
        for name, slot in given.slots.items():
            state.slots[name][:] = slot

    @abstractmethod
    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        """Update `params` and `state` in place; `gradient` is left as it is.

        Args:
            share: the part of a full step that the gradient stands for, for example 1/n where it is one worker's of n.
                The parts of a step move `params` together about as far as the full step does, and over all later steps
                each part counts as its share: an optimizer that is linear in the gradient multiplies the gradient,
                weight decay included, by `share`. Any other would undo that: it multiplies the learning rate, and
                running means keep the share-th power of their factor. With 1 the step is the full one, in every bit.
        """


def layers_of(params: FlatArray, state: OptimizerState, who: str) -> tuple[slice, ...]:
    """Where the model's tensors lie in `params`.

    Raises:
        CompositionError: nobody said, or these are not the parameters of the whole model.
    """
    if not state.tensors or state.tensors[-1].stop != len(params):
        raise CompositionError(
            f"{who} must step whole layers, got {len(params)} parameters of unknown layers; use it where workers step "
            f"themselves (all_reduce, local_sgd), or sgd"
        )
    return state.tensors


def norm(array: FlatArray) -> float:
    """The Euclidean length, summed in float64: the same bits wherever in memory the array lies."""
    parts = (cast(array[part], "float64") for part in blocks(len(array)))
    return math.sqrt(sum(float((part * part).sum()) for part in parts))


BLOCK = 32768
"""Elements that a step treats at a time, so that its temporaries are small and stay in the cache."""


def blocks(size: int) -> Iterator[slice]:
    """Slices of at most `BLOCK` elements that cover range(size) in order; none where size is 0."""
    for start in range(0, size, BLOCK):
        yield slice(start, min(start + BLOCK, size))


def require(holds: bool, name: str, rule: str, value: float, way_out: str) -> None:
    """Raise `ConfigurationError` with value, rule and way out unless `holds` (which a NaN never does)."""
    if not holds:
        raise ConfigurationError(f"{name} must be {rule}, got {value}; {way_out}")


def require_visible(eps: float, params: FlatArray) -> None:
    """Raise `ConfigurationError` where `eps` rounds to zero in the parameters' dtype: 0 / 0 would follow."""
    if rounded(eps, params) == 0:
        smallest = float(namespace(params).finfo(params.dtype).tiny)
        raise ConfigurationError(f"eps must not vanish in {params.dtype}, got {eps}; use at least {smallest:.0e}")
