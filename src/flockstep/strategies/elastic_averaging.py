"""Replicas that explore on their own, tied to a centre by an elastic force."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.expression import searched
from flockstep.messages import MASTER
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Cell, Strategy, Traits


@dataclass(frozen=True)
class ElasticAveraging(Strategy):
    """Asynchronous elastic averaging SGD (Zhang, Choromanska & LeCun 2015, algorithm 1).

    Every `period` (tau) steps worker i pulls the centre, moves by -delta and pushes delta = alpha (w_i - centre), which
    the master adds: what the worker gives is what the centre gets, so an exchange conserves w_i + centre. The sources
    disagree on the point whose gradient is used. Order `survey` (Langer et al. 2020, figure 10): that after the move,
    stable round-robin on the quadratic w²/2 for every alpha in (0, 1/2] and eta < 2. Order `paper`, as in the authors'
    code: that before the move, which comes after the gradient step; stable up to alpha = (4 - 2 eta) / (4 - eta).
    With `beta` the centre moves by beta (w_i - centre) instead (the general form of Langer et al. 2020, equations 1 and
    2, with alpha >= beta): an exchange then conserves beta w_i + alpha centre.
    """

    period: int = field(default=10, metadata=searched(1, 128))
    alpha: float = field(default=0.1, metadata=searched(0.005, 0.5, whole=False))
    order: Literal["survey", "paper"] = "survey"
    beta: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigurationError(f"period must be >= 1 local steps, got {self.period}; 10 is usual")
        if self.order not in ("survey", "paper"):
            raise ConfigurationError(f"order must be survey or paper, got {self.order}; leave it out for survey")
        most = 0.5 if self.order == "survey" else 1
        if not 0 <= self.alpha <= most:
            raise ConfigurationError(f"alpha must be in [0, {most}], got {self.alpha}; 0.9 / workers is usual")
        if self.beta is not None and not 0 <= self.beta <= self.alpha:
            raise ConfigurationError(
                f"beta must be in [0, alpha] = [0, {self.alpha}], got {self.beta}; leave it out for alpha"
            )

    # The centre hears part of every replica; workers may die.
    traits = Traits(completeness=4, survives=True, results=("server", "mean", "rank0", "best"))
    cell = Cell("decentral", "async", "ad hoc", "dedicated master")
    servers = 1

    async def worker(self, me: Worker) -> None:
        """Exchange with the centre every `period` steps; step."""
        while me.training:
            delta = await self.exchange(me) if me.step % self.period == 0 else None
            if delta is not None and self.order == "survey":
                me.params -= delta
            await self.step(me)
            if delta is not None and self.order == "paper":
                me.params -= delta

    async def exchange(self, me: Worker) -> FlatArray:
        """Pull the centre, push delta; return delta, by which the worker is still to move."""
        centre = await me.request(MASTER, "pull")
        apart: FlatArray = me.params - centre
        delta: FlatArray = self.elasticity(me) * apart
        me.send(MASTER, "push", delta if self.beta is None else self.beta * apart)
        return delta

    def elasticity(self, me: Worker) -> float:
        """alpha of the exchange that is due."""
        return self.alpha

    async def step(self, me: Worker) -> None:
        """One local step."""
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


def largest_stable(lr: float) -> float:
    """The largest alpha for which order `paper` is stable, round-robin on w²/2, for any number of workers; 0 at least.

    (4 - 2 eta) / (4 - eta): Zhang, Choromanska & LeCun 2015, section 3.2.
    """
    return max(0.0, (4 - 2 * lr) / (4 - lr)) if lr < 4 else 0.0
