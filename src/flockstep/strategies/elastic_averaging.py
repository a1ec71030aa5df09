"""Replicas that explore on their own, tied to a centre by an elastic force."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError
from flockstep.messages import MASTER
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Cell, Strategy, Traits


@dataclass(frozen=True)
class ElasticAveraging(Strategy):
    """Asynchronous elastic averaging SGD (Zhang, Choromanska & LeCun 2015, algorithm 1).

    Every `period` (tau) steps worker i pulls the centre, moves by -delta and pushes delta = alpha (w_i - centre), which
    the master adds: what the worker gives is what the centre gets, so an exchange conserves w_i + centre. The gradient
    is that of the point after the exchange, as in the survey by Langer et al. (2020, figure 10). The paper takes that
    of the point before it; there, round-robin on the quadratic w²/2, training is stable up to alpha =
    (4 - 2 eta) / (4 - eta), here for every alpha in (0, 1/2] and eta < 2.
    """

    period: int = 10
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigurationError(f"period must be >= 1 local steps, got {self.period}; 10 is usual")
        if not 0 <= self.alpha <= 0.5:
            raise ConfigurationError(f"alpha must be in [0, 0.5], got {self.alpha}; 0.9 / workers is usual")

    @property
    def traits(self) -> Traits:
        """The centre hears part of every replica; workers may die."""
        return Traits(completeness=4, survives=True, results=("server", "mean", "rank0", "best"))

    @property
    def cell(self) -> Cell:
        """Each worker meets the master by itself."""
        return Cell("decentral", "async", "ad hoc", "dedicated master")

    @property
    def servers(self) -> int:
        """One master holds the centre."""
        return 1

    async def worker(self, me: Worker) -> None:
        """Exchange with the centre every `period` steps; step."""
        while me.training:
            if me.step % self.period == 0:
                centre = await me.request(MASTER, "pull")
                delta = self.alpha * (me.params - centre)
                me.params -= delta
                me.send(MASTER, "push", delta)
            me.optimizer_step(await me.gradient())

    async def master(self, me: Server) -> None:
        """Hand out the centre; add what comes in."""
        async for message in me.messages():
            match message.tag:
                case "pull":
                    me.reply(message, me.params)
                case "push":
                    me.params += message.payload
                    me.version += 1
