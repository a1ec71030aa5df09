"""Independent replicas whose predictions are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits


@dataclass(frozen=True)
class Ensemble(Strategy):
    """An ensemble (Hansen & Salamon 1990): every worker trains its own model on its own part of the data.

    The workers exchange no messages. The result is all models together: evaluation averages their predictions (class
    probabilities for a classifier), and the models are stored as the rows of one array.
    """

    # No update ever reaches another worker.
    traits = Traits(delivery="partial", survives=True, results=("ensemble", "best", "rank0"))
    taxonomy_entry = TaxonomyEntry("decentral", "async", "none", "none")

    async def worker(self, me: Worker) -> None:
        while me.training:
            me.optimizer_step(await me.gradient())
