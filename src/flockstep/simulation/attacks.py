"""Workers whose gradients are wrong, by accident or on purpose, in virtual time and on real processes."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.nodes import Cluster
from flockstep.simulation.faults import Fault

Memory = dict[str, FlatArray]
"""State that an injected fault keeps between two gradients of a worker: name → array of shape (K,)."""


class WrongGradient(Fault):
    """A worker whose gradients are wrong, from number `begin` (inclusive, from 0) to number `end` (exclusive; 0 for no
    end).
    """

    real = True
    hostile: ClassVar[bool] = True
    """Whether the worker is an attacker, whose gradients are changed after the worker's own checks."""
    worker: int
    begin: int
    end: int

    def check(self, cluster: Cluster) -> None:
        """Check that the faulty worker exists in the run."""
        if not 0 <= self.worker < cluster.workers:
            raise ConfigurationError(
                f"an attack needs a worker's rank, got {self.worker}; use 0 to {cluster.workers - 1}"
            )
        if self.begin < 0 or (self.end and self.end <= self.begin):
            raise ConfigurationError(
                f"begin must be >= 0 and end > begin, got {self.begin} and {self.end}; end=0 means forever"
            )

    def active(self, step: int) -> bool:
        """Return whether gradient number `step` is wrong."""
        return self.begin <= step < (self.last or math.inf)

    def after(self, steps: int, worker: int) -> WrongGradient | None:
        """Return this fault for a run that continues after `steps` gradients, in which the worker has rank `worker`;
        None if the fault has ended.
        """
        end, component = self.last, cast("Any", self)  # a data class, as every component is
        if end and end <= steps:
            return None
        later: WrongGradient = dataclasses.replace(
            component, worker=worker, begin=max(0, self.begin - steps), end=max(0, end - steps)
        )
        return later

    @property
    def last(self) -> int:
        """Number of the first gradient after the fault; 0 if the fault lasts forever."""
        return self.end

    @abstractmethod
    def change(self, gradient: FlatArray, memory: Memory, part: slice) -> None:
        """Change a part of a gradient in place.

        Args:
            gradient: the part, of shape (part.stop - part.start,).
            memory: the state that is kept between two gradients.
            part: the slice of the flat array; parts of one gradient come from the end to the start.
        """

    def watch(self, gradient: FlatArray, memory: Memory, part: slice) -> None:
        """Update the state that the fault keeps from a gradient that has not been changed yet."""


@dataclass(frozen=True)
class FlipsSign(WrongGradient):
    """A worker sends -`factor` times its gradient: a sign flip (Karimireddy et al. 2021), or a reversed gradient."""

    worker: int
    factor: float = 1.0
    begin: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        require(0 < self.factor < math.inf, "factor", "> 0 and finite", self.factor, "1 flips the sign alone")

    def change(self, gradient: FlatArray, memory: Memory, part: slice) -> None:
        gradient *= -self.factor


@dataclass(frozen=True)
class Enlarges(WrongGradient):
    """A worker sends `factor` times its gradient."""

    worker: int
    factor: float = 1000.0
    begin: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        require(0 < self.factor < math.inf, "factor", "> 0 and finite", self.factor, "1000 is usual")

    def change(self, gradient: FlatArray, memory: Memory, part: slice) -> None:
        gradient *= self.factor


@dataclass(frozen=True)
class LittleIsEnough(WrongGradient):
    """A worker sends mu - `z` sigma: "a little is enough" (Baruch, Baruch & Goldberg 2019, algorithm 3).

    mu and sigma stand for the mean and the standard deviation of each element over the workers. They are estimated from
    this worker's own gradients of about 10 steps, because no attacker sees the gradients of others. All attackers
    deviate in the same direction. The paper uses z = 1.5 for most networks.
    """

    worker: int
    z: float = 1.5
    begin: int = 0
    end: int = 0

    def __post_init__(self) -> None:
        require(math.isfinite(self.z), "z", "finite", self.z, "the paper uses 1.5")

    def watch(self, gradient: FlatArray, memory: Memory, part: slice) -> None:
        key = f"{part.start}:{part.stop}"
        mean, square = memory.get(f"mean {key}"), memory.get(f"square {key}")
        memory[f"mean {key}"] = 1.0 * gradient if mean is None else 0.9 * mean + 0.1 * gradient
        squared = gradient * gradient
        memory[f"square {key}"] = squared if square is None else 0.9 * square + 0.1 * squared

    def change(self, gradient: FlatArray, memory: Memory, part: slice) -> None:
        key = f"{part.start}:{part.stop}"
        mean = memory[f"mean {key}"]
        variance = (memory[f"square {key}"] - mean * mean).clip(0)
        gradient[:] = mean - self.z * namespace(gradient).sqrt(variance)


@dataclass(frozen=True)
class Miscomputes(WrongGradient):
    """A worker computes NaN in place of element `element` of its gradient number `begin`, or of all gradients from
    `begin` to `end` (exclusive).

    The worker is faulty, not hostile: its own checks see the wrong gradient. With `end` 0, only one gradient is wrong.
    """

    hostile = False
    worker: int
    begin: int = 0
    end: int = 0
    element: int = 0

    @property
    def last(self) -> int:
        return self.end or self.begin + 1

    def change(self, gradient: FlatArray, memory: Memory, part: slice) -> None:
        if part.start <= self.element < part.stop:
            gradient[self.element - part.start] = math.nan
