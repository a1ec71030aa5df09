"""Synchronous all-reduce SGD: every step applies the mean gradient of all workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flockstep.arrays.kernels import name_of
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import check_composition
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.encoding import codec_for, encoded


@dataclass
class AllReduceState:
    """A worker's state: the memory of its error feedback."""

    memory: Any = None


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Synchronous all-reduce SGD (Baidu 2017; Sergeev & Del Balso 2018): every step applies the mean of all gradients.

    Every worker computes w ← w - η · (1/n) Σ g_i. The replicas are equal in every bit after every step. With a lossy
    `codec`, each worker encodes its g_i once, with `feedback`, and `collective` sums the decoded values: with a linear
    codec during the reduction, with other codecs after every worker has received all n encodings, which takes n-1 times
    the bytes of one encoding.
    """

    collective: Collective = field(default_factory=ByHost)
    codec: Codec = field(default_factory=Identity)
    feedback: Feedback = field(default_factory=NoFeedback)

    def __post_init__(self) -> None:
        check_composition(self.codec, self.feedback)

    # Synchronous: a dead worker stops all workers.
    traits = Traits(delivery="synchronous", survives=False, results=("rank0", "mean"), clips="combined")
    taxonomy_entry = TaxonomyEntry("central", "sync", "all-reduce", "replicated PS")

    def worker_state(self, me: Worker) -> AllReduceState:
        return AllReduceState()

    async def worker(self, me: Worker) -> None:
        while me.training:
            gradient = await me.gradient()
            if self.codec == Identity() and self.feedback == NoFeedback():
                await self.collective.average(me, gradient)
            else:
                gradient = await self._mean(me, gradient)
            me.record_round()
            me.optimizer_step(gradient)

    async def _mean(self, me: Worker, gradient: FlatArray) -> FlatArray:
        """Return the mean of all workers' decoded gradients."""
        kept: AllReduceState = me.state
        data, kept.memory = encoded(me, self.codec, self.feedback, gradient, kept.memory)
        codec = codec_for(me, self.codec, self.feedback)
        total = await self.collective.sum_encoded(me, data, codec, len(gradient), name_of(gradient))
        total /= me.workers
        return total
