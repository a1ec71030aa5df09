"""Synchronous elastic averaging: the center moves once it has the parameters of all workers."""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.messages import MASTER
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits, check_replicas
from flockstep.strategies.resizing import Resizing


@dataclass
class Gathered:
    """The server's state: rank → parameters received from the worker since the center last moved."""

    here: dict[int, FlatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class SynchronousElasticAveraging(Strategy):
    """Synchronous EASGD (Zhang, Choromanska & LeCun 2015, equations 5 and 6): all replicas exchange with a center at
    the same time.

    w_i ← w_i - lr g_i - alpha (w_i - center) and center ← (1 - beta) center + beta mean_i w_i, beta = p alpha, where
    every right-hand side is evaluated at time t (Jacobi). A dedicated server holds the center and computes center ←
    center + sum_i alpha (w_i - center), so that the center moves by exactly the sum of what the workers subtract. A
    worker sends w_i and computes its gradient while the server returns the center: 2 K elements per exchange and
    worker. Exchanges take place every `period` steps; in between, each worker steps alone. `replicas` is the number of
    backups of the server.
    """

    period: int = 1
    alpha: float | None = None
    replicas: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        require(self.period >= 1, "period", ">= 1 local steps", self.period, "use 1 to exchange at every step")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"alpha must be in [0, 1], got {self.alpha}; leave it out for 0.9 / workers, that is beta = 0.9"
            )

    # Replicas are never equal; a dead worker stops all workers.
    traits = Traits(delivery="partial", survives=False, results=("server", "mean", "rank0", "best"))
    taxonomy_entry = TaxonomyEntry("decentral", "sync", "reduce", "dedicated master")
    servers = 1

    def check(self, workers: int) -> None:
        """Check that beta = p alpha, for p workers, is at most 1. Above 1, the center would overshoot the mean of the
        replicas.

        Raises:
            ConfigurationError: beta exceeds 1.
        """
        if self.alpha is not None and self.alpha * workers > 1:
            raise ConfigurationError(
                f"beta = workers × alpha must be <= 1, got {workers} × {self.alpha}; use alpha={0.9 / workers:.3g}"
            )

    def rate(self, workers: int) -> float:
        """Return the elastic rate alpha, by default 0.9 / workers."""
        return 0.9 / workers if self.alpha is None else self.alpha

    resizing = Resizing(replicas="own")

    def master_state(self, me: Server) -> Gathered:
        return Gathered()

    async def worker(self, me: Worker) -> None:
        """Take steps; after every `period` steps, also apply the elastic move computed from the parameters before the
        step.
        """
        while me.training:
            if me.step % self.period:
                me.optimizer_step(await me.gradient())
                continue
            me.send(MASTER, "model", me.params)
            before = copied(me.params)
            me.optimizer_step(await me.gradient())
            center = (await me.receive("center", MASTER)).payload
            me.params -= self.rate(me.workers) * (before - center)

    async def master(self, me: Server) -> None:
        """Once the parameters of all workers have arrived, send the center to the workers, then move the center."""
        n, here = me.cluster.workers, me.state.here
        async for message in me.messages():
            if message.tag != "model":
                continue
            here[message.source] = message.payload
            if len(here) == n:
                me.send_all(range(n), "center", me.params)
                center = copied(me.params)
                for rank in range(n):
                    me.params += self.rate(n) * (here[rank] - center)
                me.version += 1
                here.clear()
