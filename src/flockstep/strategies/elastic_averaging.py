"""Asynchronous elastic averaging: replicas train independently, and an elastic force pulls each replica toward a
center.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.messages import MASTER
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits, check_replicas
from flockstep.strategies.resizing import Resizing


@dataclass(frozen=True)
class ElasticAveraging(Strategy):
    """Asynchronous EASGD (Zhang, Choromanska & LeCun 2015, algorithm 1): replicas are pulled toward a center.

    Every `period` (tau) steps worker i pulls the center, moves by -delta and pushes delta = alpha (w_i - center), which
    the server adds to the center, so an exchange conserves w_i + center. The sources disagree on the parameters at
    which the gradient is computed. Order `survey` (Langer et al. 2020, figure 10) takes the gradient after the elastic
    move; on the quadratic w²/2 with round-robin exchanges this order is stable for every alpha in (0, 1/2] and eta < 2.
    Order `paper`, which the authors' code has, takes the gradient before the elastic move and moves after the gradient
    step; this order is stable up to alpha = (4 - 2 eta) / (4 - eta).

    With `beta` the center moves by beta (w_i - center) instead (the general form of Langer et al. 2020, equations 1 and
    2, with alpha >= beta): an exchange then conserves beta w_i + alpha center. `replicas` is the number of backups of
    the server, one of which takes its place if it dies.
    """

    period: int = 10
    alpha: float = 0.1
    order: Literal["survey", "paper"] = "survey"
    beta: float | None = field(default=None, kw_only=True)
    replicas: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        require(self.period >= 1, "period", ">= 1 local steps", self.period, "10 is usual")
        require(self.order in ("survey", "paper"), "order", "survey or paper", self.order, "leave it out for survey")
        most = 0.5 if self.order == "survey" else 1
        require(0 <= self.alpha <= most, "alpha", f"in [0, {most}]", self.alpha, "0.9 / workers is usual")
        if self.beta is not None and not 0 <= self.beta <= self.alpha:
            raise ConfigurationError(
                f"beta must be in [0, alpha] = [0, {self.alpha}], got {self.beta}; leave it out for alpha"
            )

    # The center receives part of every replica; workers may die.
    traits = Traits(delivery="partial", survives=True, results=("server", "mean", "rank0", "best"))
    taxonomy_entry = TaxonomyEntry("decentral", "async", "ad hoc", "dedicated master")
    servers = 1

    resizing = Resizing(replicas="own")

    async def worker(self, me: Worker) -> None:
        while me.training:
            delta = await self.exchange(me) if me.step % self.period == 0 else None
            if delta is not None and self.order == "survey":
                me.params -= delta
            await self.step(me)
            if delta is not None and self.order == "paper":
                me.params -= delta

    async def exchange(self, me: Worker) -> FlatArray:
        """Pull the center from the server and push the center's move; return delta (K,), by which the worker must still
        move.
        """
        center = await me.request(MASTER, "pull")
        apart: FlatArray = me.params - center
        delta: FlatArray = self.elasticity(me) * apart
        me.send(MASTER, "push", delta if self.beta is None else self.beta * apart)
        return delta

    def elasticity(self, me: Worker) -> float:
        """Return the elastic rate alpha for the current exchange."""
        return self.alpha

    async def step(self, me: Worker) -> None:
        """Take one local step with the job's optimizer."""
        me.optimizer_step(await me.gradient())

    async def master(self, me: Server) -> None:
        """Answer each pull with the center, and add each push to the center."""
        async for message in me.messages():
            match message.tag:
                case "pull":
                    me.reply(message, me.params)
                case "push":
                    me.params += message.payload
                    me.version += 1


def largest_stable(lr: float) -> float:
    """Return the largest alpha >= 0 for which order `paper` is stable on the quadratic w²/2 with round-robin exchanges
    of any number of workers.

    The bound is (4 - 2 eta) / (4 - eta) (Zhang, Choromanska & LeCun 2015, section 3.2).

    Args:
        lr: the learning rate eta.
    """
    return max(0.0, (4 - 2 * lr) / (4 - lr)) if lr < 4 else 0.0
