"""A schedule with linear scaling of the learning rate and a gradual warm-up."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError
from flockstep.schedules.base import Extent, Schedule, check_epochs, check_positive, check_shares


@dataclass(frozen=True)
class Goyal(Schedule):
    """Linear scaling with gradual warm-up (Goyal et al. 2017, sections 2.1 and 2.2): k times the rate of one worker.

    k is `workers`, by default the run's number of workers. Over the first `warmup` epochs the factor rises from 1 to k
    by the same amount at every step; with gradual=False it is 1 during the warm-up, then k at once (the paper's
    "constant warm-up"); with warmup=0 it is k from the start. After the fractions `at` of the run (epochs 30, 60 and 80
    of 90) it falls by `decay`. Gradients are means over a worker's batch and over the workers, so they are normalized
    by the whole batch of k n. The momentum correction of Goyal et al. (remark 2: if v contains the rate, v is scaled by
    the ratio of the new rate to the old rate) is not needed, because the velocity of `sgd` does not contain the
    learning rate. Lin et al. 2018 use the same name for a different correction, of values that a codec drops; see the
    feedback momentum.
    """

    workers: int | None = None
    warmup: float = 5.0
    gradual: bool = True
    decay: float = 0.1
    at: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise ConfigurationError(
                f"workers of goyal must be >= 1, got {self.workers}; leave it out for the run's number of workers"
            )
        check_epochs("goyal", self.warmup)
        check_positive("goyal", decay=self.decay)
        check_shares(self.at, "goyal")

    def factor(self, epoch: float, run: Extent) -> float:
        """Return the factor on the learning rate: the factor of the warm-up times the factors of the decays."""
        k = run.workers if self.workers is None else self.workers
        scale = float(k)
        if epoch < self.warmup:
            scale = 1 + (k - 1) * epoch / self.warmup if self.gradual else 1.0
        return scale * self.decay ** sum(run.reached(share, epoch) for share in self.at)
