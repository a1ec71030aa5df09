"""Sufficient factor broadcasting: the gradients of fully connected layers are sent as factors if the factors are
smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import CompositionError
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits


@dataclass(frozen=True)
class SufficientFactors(Strategy):
    """Sufficient factor broadcasting (Xie et al. 2016; Poseidon: Zhang et al. 2017, section 3.2): layers are sent as
    factors.

    The gradient of an M × N layer over B samples is Uᵀ V with U (B, M) and V (B, N). A worker broadcasts U and V, adds
    up all workers' products in order of rank, and all-reduces the rest of the gradient: w ← w - η · (1/n) Σ g_i. The
    result equals that without factors up to rounding, and is equal in every bit on all workers. A layer's factors are
    sent if B (n - 1) (M + N) <= 2 (n - 1) MN / n elements, that is, if a worker sends less than its part in a ring
    all-reduce. This is Poseidon's rule for as many servers as workers.
    """

    collective: Collective = field(default_factory=ByHost)

    # Synchronous: a dead worker stops all workers.
    traits = Traits(delivery="synchronous", survives=False, results=("rank0", "mean"), needs_job=True, samples="sent")
    taxonomy_entry = TaxonomyEntry("central", "sync", "all-reduce", "replicated PS")

    def worker_state(self, me: Worker) -> None:
        """Check that the model has layers that can be factored; return no state.

        Raises:
            CompositionError: the model has no such layer.
        """
        require_layers(self, me)

    async def worker(self, me: Worker) -> None:
        layers = self.chosen(me.layers, me.workers)
        packing = Packing(len(me.params), layers)
        while me.training:
            packed = await (me.gradient_in_factors(layers) if layers else me.gradient())
            rest, factors = packed[: packing.rest], packed[packing.rest :]
            if layers:
                me.send_all(me.peers, "factors", factors)
            await self.collective.all_reduce(me, rest)
            if layers:
                every = [
                    factors if rank == me.rank else (await me.receive("factors", rank)).payload
                    for rank in range(me.workers)
                ]
                rest = packing.total(rest, every)
            rest /= me.workers
            me.record_round()
            me.optimizer_step(rest)

    def chosen(self, layers: tuple[FactoredWeight, ...], workers: int) -> tuple[FactoredWeight, ...]:
        """Return the layers for which a worker sends no more elements as factors than in a ring all-reduce."""
        return tuple(layer for layer in layers if workers > 1 and layer.factors * workers <= 2 * layer.dense)


def require_layers(strategy: Strategy, me: Worker) -> None:
    """Check that the model has layers that can be factored.

    Raises:
        CompositionError: the model has no such layer.
    """
    if not me.layers:
        raise CompositionError(
            f"{strategy} sends factors of fully connected layers, but this model has no layer that can be factored; "
            "use a model with torch.nn.Linear modules, or a strategy that sends gradients"
        )
