"""The contract of an optimiser."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.expression import Component


@dataclass
class OptimizerState:
    """What an optimiser remembers between steps: a count, and named arrays as long as the parameters."""

    steps: int = 0
    slots: dict[str, FlatArray] = field(default_factory=dict)


class Optimizer(Component):
    """An elementwise update rule; its fields are its hyper-parameters, `lr` always among them.

    Elementwise means that a slice of the parameters can be stepped on its own: a shard's result equals the
    same slice of the whole, bit for bit.
    """

    noun: ClassVar[str] = "optimizer"
    lr: float

    @abstractmethod
    def init(self, params: FlatArray) -> OptimizerState:
        """A fresh state for `params`."""

    @abstractmethod
    def step(self, params: FlatArray, gradient: FlatArray, state: OptimizerState, lr: float) -> None:
        """Update `params` and `state` in place; `gradient` is left as it is."""


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
    if params.dtype.type(eps) == 0:
        smallest = float(np.finfo(params.dtype).tiny)
        raise ConfigurationError(f"eps must not vanish in {params.dtype}, got {eps}; use at least {smallest:.0e}")
