"""The momentum that asynchrony brings by itself is taken off the explicit one."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.optimizers.base import require
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.rules.heavy_ball import HeavyBall


@dataclass(frozen=True)
class MomentumCorrected(HeavyBall):
    """Momentum corrected for asynchrony (Mitliagkas, Zhang, Hadjis & Ré 2016, theorem 1 and section 4).

    M asynchronous workers whose gradients take exponential times behave in expectation as one with momentum 1 - 1/M.
    Explicit momentum adds to that, to first order, so mu = total - (1 - 1/M): smaller than `total`, and negative where
    asynchrony alone brings more. `total=none` means the momentum of the job's sgd, which then is what the run as a
    whole has. With one worker it is that sgd, bit for bit. For synchronous consistency rules, which bring no momentum,
    use the rule plain.
    """

    total: float | None = None

    def __post_init__(self) -> None:
        total = self.total or 0.0
        require(0 <= total < 1, "total of momentum_corrected", "in [0, 1)", total, "use for example 0.9")

    def explicit(self, workers: int, optimizer: SGD) -> float:
        """total - (1 - 1/M)."""
        total = optimizer.momentum if self.total is None else self.total
        return total - (1 - 1 / workers)
