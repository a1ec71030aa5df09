"""A schedule whose learning rate falls by a factor at given fractions of the run."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.schedules.base import Extent, Schedule, check_positive, check_shares


@dataclass(frozen=True)
class StepDecay(Schedule):
    """Step decay (He et al. 2016): `scale` times the job's rate, multiplied by `decay` after each fraction `at` of the
    run.
    """

    decay: float = 0.1
    at: tuple[float, ...] = (0.5, 0.75)
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_positive("step_decay", decay=self.decay, scale=self.scale)
        check_shares(self.at, "step_decay")

    def factor(self, epoch: float, run: Extent) -> float:
        """Return the factor on the learning rate: scale × decay^(number of fractions reached)."""
        return self.scale * self.decay ** sum(run.reached(share, epoch) for share in self.at)
