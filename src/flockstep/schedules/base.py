"""The interface of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.errors import ConfigurationError, require
from flockstep.expression import Component

ROUNDING = 1e-9
"""Relative tolerance within which a product such as 0.6 × 300 counts as an integer despite rounding errors."""


@dataclass(frozen=True)
class Extent:
    """Length of a run for its schedule: epochs, counted as passes of all workers together over the data, and number of
    workers.
    """

    epochs: float
    workers: int

    def reached(self, share: float, epoch: float) -> bool:
        """Return whether the fraction `share` of the run has passed at time `epoch`, in epochs."""
        return epoch >= (share - ROUNDING) * self.epochs


class Schedule(Component):
    """The change of learning rate and batch size in the course of a run, as factors on the job's learning rate and
    batch size.

    Epochs count passes of all workers together, as fractions from 0; a schedule has no state.
    """

    noun: ClassVar[str] = "schedule"

    def factor(self, epoch: float, run: Extent) -> float:
        """Return the factor on the job's learning rate in the step that begins at `epoch`."""
        return 1.0

    @property
    def stages(self) -> tuple[tuple[float, float], ...]:
        """Return pairs (fraction of the run's samples, factor on the job's batch size from this fraction on); the first
        fraction is 0.
        """
        return ((0.0, 1.0),)


def check_shares(at: tuple[float, ...], who: str) -> None:
    """Check that `at` ascends strictly within (0, 1).

    Raises:
        ConfigurationError: `at` does not ascend strictly within (0, 1).
    """
    if not all(a < b for a, b in zip((0.0, *at), (*at, 1.0), strict=True)):
        raise ConfigurationError(
            f"at of {who} must be fractions of the run in ascending order within (0, 1), got {at}; use for example "
            "(0.5, 0.75)"
        )


def check_positive(who: str, **values: float) -> None:
    """Check that all `values` are positive and finite.

    Raises:
        ConfigurationError: a value is not positive or not finite; the message names the first such value.
    """
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ConfigurationError(
                f"{name} of {who} must be > 0 and finite, got {value}; use 1 to leave the learning rate unchanged"
            )


def check_epochs(who: str, epochs: float) -> None:
    """Check that `epochs` is a valid length of a warm-up.

    Raises:
        ConfigurationError: `epochs` is negative or not finite.
    """
    require(0 <= epochs < float("inf"), f"warmup of {who}", ">= 0 epochs and finite", epochs, "use 0 for none")
