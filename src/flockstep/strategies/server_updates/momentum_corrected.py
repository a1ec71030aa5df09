"""Server update that reduces the explicit momentum by the momentum that asynchrony causes."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import require
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.server_updates.heavy_ball import HeavyBall


@dataclass(frozen=True)
class MomentumCorrected(HeavyBall):
    """Momentum corrected for asynchrony (Mitliagkas, Zhang, Hadjis & Ré 2016, theorem 1 and section 4).

    M asynchronous workers whose gradients take exponentially distributed times behave in expectation as one worker with
    momentum 1 - 1/M. Explicit momentum adds to this momentum, to first order. So mu = total - (1 - 1/M), which is
    smaller than `total`, and negative if asynchrony alone causes more momentum than `total`. `total=none` stands for
    the momentum of the job's sgd, which is then the momentum of the whole run. With one worker the rule equals the
    job's sgd, bit for bit. Synchronous consistency rules cause no momentum: use the rule plain with them.
    """

    total: float | None = None

    def __post_init__(self) -> None:
        total = self.total or 0.0
        require(0 <= total < 1, "total of momentum_corrected", "in [0, 1)", total, "use for example 0.9")

    def explicit(self, workers: int, optimizer: SGD) -> float:
        """Return the explicit momentum total - (1 - 1/M) for M workers."""
        total = optimizer.momentum if self.total is None else self.total
        return total - (1 - 1 / workers)
