"""Elastic averaging in lock-step: the centre hears everyone at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.expression import searched
from flockstep.messages import MASTER
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Cell, Strategy, Traits


@dataclass
class Gathered:
    """What the master has received since the centre moved last: rank → parameters."""

    here: dict[int, FlatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class SynchronousElasticAveraging(Strategy):
    """Synchronous elastic averaging SGD (Zhang, Choromanska & LeCun 2015, equations 5 and 6).

    w_i ← w_i - lr g_i - alpha (w_i - centre) and centre ← (1 - beta) centre + beta mean_i w_i, beta = p alpha, where
    everything on the right is of time t (Jacobi). A dedicated master holds the centre; in the form that it computes,
    centre ← centre + sum_i alpha (w_i - centre), what a worker gives is what the centre gets. A worker sends w_i and
    computes its gradient while the centre comes back: 2 K per exchange and worker. Between exchanges, every `period`
    steps, a worker steps alone.
    """

    period: int = field(default=1, metadata=searched(1, 128))
    alpha: float | None = field(default=None, metadata=searched(0.005, 0.5, whole=False))

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigurationError(f"period must be >= 1 local steps, got {self.period}; 1 exchanges at every step")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"alpha must be in [0, 1], got {self.alpha}; leave it out for 0.9 / workers, that is beta = 0.9"
            )

    # Replicas are never equal; a dead worker stops everyone.
    traits = Traits(completeness=4, survives=False, results=("server", "mean", "rank0", "best"))
    cell = Cell("decentral", "sync", "reduce", "dedicated master")
    servers = 1

    def check(self, workers: int) -> None:
        """beta = p alpha must not exceed 1, beyond which the centre overshoots the mean."""
        if self.alpha is not None and self.alpha * workers > 1:
            raise ConfigurationError(
                f"beta = workers × alpha must be <= 1, got {workers} × {self.alpha}; use alpha={0.9 / workers:.3g}"
            )

    def rate(self, workers: int) -> float:
        """alpha; unless it is given, 0.9 / workers."""
        return 0.9 / workers if self.alpha is None else self.alpha

    def master_state(self, me: Server) -> Gathered:
        """Nothing has arrived."""
        return Gathered()

    async def worker(self, me: Worker) -> None:
        """Step; every `period` steps with the elastic move of the point before the step."""
        while me.training:
            if me.step % self.period:
                me.optimizer_step(await me.gradient())
                continue
            me.send(MASTER, "model", me.params)
            before = copied(me.params)
            me.optimizer_step(await me.gradient())
            centre = (await me.receive("centre", MASTER)).payload
            me.params -= self.rate(me.workers) * (before - centre)

    async def master(self, me: Server) -> None:
        """When every worker's parameters are here: hand out the centre, then move it."""
        n, here = me.cluster.workers, me.state.here
        async for message in me.messages():
            if message.tag != "model":
                continue
            here[message.source] = message.payload
            if len(here) == n:
                me.send_all(range(n), "centre", me.params)
                centre = copied(me.params)
                for rank in range(n):
                    me.params += self.rate(n) * (here[rank] - centre)
                me.version += 1
                here.clear()
