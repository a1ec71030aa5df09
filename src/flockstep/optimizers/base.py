"""The interface of an optimizer, and the state that an optimizer keeps between steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from flockstep.arrays.namespace import cast, namespace, rounded
from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.expression import Component


@dataclass(slots=True)
class OptimizerState:
    """An optimizer's state between steps: a count of steps, and named arrays as long as the parameters."""

    steps: float = 0
    """Number of full steps taken so far; a partial step counts as its share."""
    slots: dict[str, FlatArray] = field(default_factory=dict)
    tensors: tuple[slice, ...] = ()
    """The slice of each of the model's tensors, for optimizers that work layer by layer; set by nodes that hold a whole
    model.
    """
    lr: float = 0.0
    """Learning rate of the last step, which some optimizers need in order to see that it has changed."""
    start: int = 0
    """Index, in the model's flat array, of the first parameter that the state belongs to."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Scalar state of another library's optimizer in a saved state: "name:group" → value."""
    foreign: Any = None
    """State of another library's optimizer that can only step all parameters together."""


class Optimizer(Component):
    """A rule that updates parameters from gradients; its fields are its hyper-parameters, including `lr`.

    Elementwise means that a slice of the parameters can be stepped alone: the result on a slice equals the same slice
    of the result on the whole array, bit for bit.
    """

    noun: ClassVar[str] = "optimizer"
    elementwise: ClassVar[bool] = True
    """Whether a slice of the parameters can be updated alone; if not, steps need the whole model and
    `OptimizerState.tensors`.
    """
    lr: float
    """Learning rate; NaN if only another library's optimizer knows the learning rate."""

    @property
    def on_servers(self) -> Optimizer:
        """Return the form of this optimizer that servers execute."""
        return self

    @property
    def by_place(self) -> bool:
        """Whether the step of an element depends on the element's position in the flat array of the whole model."""
        return False

    def with_lr(self, lr: float) -> Optimizer:
        """Return a copy of this optimizer with another learning rate.

        Raises:
            ConfigurationError: the learning rate cannot be set.
        """
        return replace(self, lr=lr)  # type: ignore[type-var]

    @abstractmethod
    def init(self, params: FlatArray) -> OptimizerState:
        """Return the initial state for `params`, of shape (K,)."""

    def load(self) -> None:
        """Import the modules that steps need, so that the first step does not take longer."""

    def init_slice(self, params: FlatArray, part: slice) -> OptimizerState:
        """Return the initial state for a slice of the model's parameters."""
        state = self.init(params[part])
        state.start = part.start
        return state

    def remembered(self, state: OptimizerState) -> OptimizerState:
        """Return the part of `state` that a checkpoint holds: the number of steps, the slots and the scalar state."""
        return state

    def recall(self, params: FlatArray, state: OptimizerState, given: OptimizerState) -> None:
        """Set `state`, which belongs to `params`, to the contents of `given`, which `remembered` returned."""
        state.steps = given.steps
        for name, slot in given.slots.items():
            state.slots[name][:] = slot

    @abstractmethod
    def step(
        self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float, share: float = 1.0
    ) -> None:
        """Update `params` and `state` in place; `gradient` does not change.

        Args:
            params: the parameters, of shape (K,).
            gradient: the gradient, of shape (K,).
            state: what `init` returned for `params`.
            lr: the learning rate of this step.
            share: the part of a full step that the gradient makes, for example 1/n for the gradient of one of n
                workers. The parts of a step together move `params` about as far as the full step, and over all later
                steps each part counts as its share. An optimizer that is linear in the gradient multiplies the
                gradient, weight decay included, by `share`. In any other optimizer, a factor on the gradient would have
                no effect; such an optimizer multiplies the learning rate instead, and raises the factors of its running
                means to the power of `share`. With 1, the step equals a full step in every bit.
        """


def layers_of(params: FlatArray, state: OptimizerState, who: str) -> tuple[slice, ...]:
    """Return the slices of the model's tensors in `params`.

    Raises:
        CompositionError: the tensors are unknown, or `params` are not the parameters of the whole model.
    """
    if not state.tensors or state.tensors[-1].stop != len(params):
        raise CompositionError(
            f"{who} needs whole layers, got {len(params)} parameters whose layers are not known; use {who} where "
            "workers update the parameters (all_reduce, local_sgd), or use sgd"
        )
    return state.tensors


def norm(array: FlatArray) -> float:
    """Return the Euclidean norm of an array, summed in float64; the result is the same, bit for bit, for any memory
    layout.
    """
    parts = (cast(array[part], "float64") for part in blocks(len(array)))
    return math.sqrt(sum(float((part * part).sum()) for part in parts))


BLOCK = 32768
"""Number of elements that a step processes at a time, so that its temporaries are small and stay in the cache."""


def blocks(size: int) -> Iterator[slice]:
    """Yield slices of at most `BLOCK` elements that cover range(size) in order."""
    for start in range(0, size, BLOCK):
        yield slice(start, min(start + BLOCK, size))


def require_visible(eps: float, params: FlatArray) -> None:
    """Check that `eps` does not round to zero in the parameters' dtype, where 0 / 0 could follow.

    Raises:
        ConfigurationError: `eps` rounds to zero.
    """
    if rounded(eps, params) == 0:
        smallest = float(namespace(params).finfo(params.dtype).tiny)
        raise ConfigurationError(
            f"eps must not round to zero in {params.dtype}, got {eps}; use at least {smallest:.0e}"
        )
