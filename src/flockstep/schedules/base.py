"""The contract of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.errors import ConfigurationError
from flockstep.expression import Component

ROUNDING = 1e-9
"""A product such as 0.6 × 300 that misses a whole number by rounding alone must not cost a step."""


@dataclass(frozen=True)
class Extent:
    """What a schedule is told of its run: passes of all workers together over the data, and how many workers."""

    epochs: float
    workers: int

    def reached(self, share: float, epoch: float) -> bool:
        """Whether that share of the run lies behind at `epoch`."""
        return epoch >= (share - ROUNDING) * self.epochs


class Schedule(Component):
    """How learning rate and batch change in the course of a run: factors on the job's own.

    Epochs count passes of all workers together, as fractions from 0; a schedule has no state.
    """

    noun: ClassVar[str] = "schedule"

    def factor(self, epoch: float, run: Extent) -> float:
        """What the job's learning rate is multiplied by in the step that begins at `epoch`."""
        return 1.0

    @property
    def stages(self) -> tuple[tuple[float, float], ...]:
        """(share of the run's samples, what the job's batch is multiplied by from there on); the first share is 0."""
        return ((0.0, 1.0),)


def check_shares(at: tuple[float, ...], who: str) -> None:
    """Raise `ConfigurationError` unless `at` ascends strictly within (0, 1)."""
    if not all(a < b for a, b in zip((0.0, *at), (*at, 1.0), strict=True)):
        raise ConfigurationError(
            f"at of {who} must be shares of the run that ascend within (0, 1), got {at}; use for example (0.5, 0.75)"
        )


def check_positive(who: str, **values: float) -> None:
    """Raise `ConfigurationError` for the first of `values` that is not positive and finite."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ConfigurationError(f"{name} of {who} must be > 0 and finite, got {value}; 1 changes nothing")


def check_epochs(who: str, epochs: float) -> None:
    """Raise `ConfigurationError` unless a warm-up may last that long."""
    if not 0 <= epochs < float("inf"):
        raise ConfigurationError(f"warmup of {who} must be >= 0 epochs and finite, got {epochs}; use 0 for none")
