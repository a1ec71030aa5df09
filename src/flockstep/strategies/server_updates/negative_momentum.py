"""Server update with negative explicit momentum, which counteracts the momentum that asynchrony adds."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import require
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.server_updates.heavy_ball import HeavyBall


@dataclass(frozen=True)
class NegativeMomentum(HeavyBall):
    """Negative momentum (Mitliagkas, Zhang, Hadjis & Ré 2016, section 5): damps the momentum that asynchrony causes.

    v ← momentum v + g, w ← w - lr v with momentum in (-1, 0], in place of the momentum of the job's sgd.
    """

    momentum: float = -0.25

    def __post_init__(self) -> None:
        needs = "in (-1, 0]"
        require(-1 < self.momentum <= 0, "momentum of negative_momentum", needs, self.momentum, "use for example -0.25")

    def explicit(self, workers: int, optimizer: SGD) -> float:
        return self.momentum
