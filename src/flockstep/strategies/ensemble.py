"""Independent replicas whose predictions are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits


@dataclass(frozen=True)
class Ensemble(Strategy):
    """An ensemble (Hansen & Salamon 1990): every worker trains a model of its own on its part of the data.

    Nothing travels. The result is all models together: they are evaluated by the mean of their predictions (of class
    probabilities where there are classes), and kept as the rows of one array.
    """

    # No update ever reaches another worker.
    traits = Traits(completeness=4, survives=True, results=("ensemble", "best", "rank0"))
    cell = Cell("decentral", "async", "none", "none")

    async def worker(self, me: Worker) -> None:
        """Step."""
        while me.training:
            me.optimizer_step(await me.gradient())
