"""Codistillation: replicas that learn from each other's predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, require
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits


@dataclass
class Teachers:
    """A worker's state: the most recent parameters that each peer has sent, by rank."""

    params: dict[int, FlatArray] = field(default_factory=dict)


@dataclass(frozen=True)
class Codistillation(Strategy):
    """Codistillation (Anil et al. 2018, algorithm 1): replicas learn from each other's predictions.

    Every worker trains its own model on its own part of the data, and sends a copy of the model to all other workers
    every `period` steps. From step `burn_in` on, a worker minimizes its loss plus `weight` times the distance between
    its predictions and the mean prediction of the copies that it holds, whatever their age; each copy costs one
    additional forward pass. With weight 0, or with a period longer than the run, the strategy trains an ensemble.
    """

    period: int = 50
    weight: float = 1.0
    burn_in: int = 0

    def __post_init__(self) -> None:
        require(self.period >= 1, "period", ">= 1 steps", self.period, "50 is usual")
        if not 0 <= self.weight < math.inf:
            raise ConfigurationError(
                f"weight must be >= 0 and finite, got {self.weight}; at 1 the term has the weight of the loss"
            )
        require(self.burn_in >= 0, "burn_in", ">= 0 steps", self.burn_in, "use 0 to learn from the first copies")

    # Updates reach other workers through predictions only; workers may die.
    traits = Traits(
        "partial", survives=True, results=("best", "ensemble", "rank0"), needs_job=True, plain_gradients=False
    )
    taxonomy_entry = TaxonomyEntry("decentral", "async", "ad hoc", "p2p mesh")

    def worker_state(self, me: Worker) -> Teachers:
        return Teachers()

    async def worker(self, me: Worker) -> None:
        state: Teachers = me.state
        while me.training:
            if me.step and me.step % self.period == 0:
                me.send_all(me.peers, "copy", me.params)
            for message in me.arrived("copy"):
                state.params[message.source] = message.payload
            if state.params and self.weight and me.run_step >= self.burn_in:
                teachers = [params for _, params in sorted(state.params.items())]
                gradient = await me.gradient_toward(teachers, self.weight)
            else:
                gradient = await me.gradient()
            me.optimizer_step(gradient)
