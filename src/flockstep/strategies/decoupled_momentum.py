"""DeMo, decoupled momentum: workers keep their momentum, and exchange only its largest components in the frequency
domain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.codecs.dct import Dct
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import require
from flockstep.expression import ELEMENTS
from flockstep.feedback.nothing import NoFeedback
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.encoding import codec_for
from flockstep.strategies.resizing import Resizing


@dataclass
class DecoupledMomentumState:
    """A worker's state: delta (K,), the part of the worker's momentum that it has not sent."""

    delta: FlatArray


@dataclass(frozen=True)
class DecoupledMomentum(Strategy):
    """DeMo, decoupled momentum (Peng, Quesnelle & Kingma 2024, algorithm 1 and section 3): workers exchange the largest
    frequency components of their momentum.

    delta ← beta · delta + lr · g; q, the `k` largest coefficients of the DCT of every chunk × chunk block of delta, is
    subtracted from delta and gathered from all workers; w ← w - lr · sign(mean of the decoded q), with the job's
    optimizer, which should be plain SGD. The mean is over all workers, as in the paper; the authors' code divides every
    coefficient by the number of workers that sent it. An element whose mean is exactly zero does not change.
    """

    beta: float = 0.999
    k: int = field(default=32, metadata=ELEMENTS)
    chunk: int = field(default=64, metadata=ELEMENTS)
    collective: Collective = field(default_factory=ByHost)

    def __post_init__(self) -> None:
        require(0 <= self.beta <= 1, "beta", "in [0, 1]", self.beta, "0.999 is usual")
        Dct(self.k, self.chunk)

    # Synchronous: a dead worker stops all workers.
    traits = Traits(delivery="synchronous", survives=False, results=("rank0", "mean"), approximation="sent later")
    taxonomy_entry = TaxonomyEntry("central", "sync", "all-reduce", "replicated PS")

    @property
    def coding(self) -> Codec:
        return Dct(self.k, self.chunk)

    resizing = Resizing(own=("delta",))

    def worker_state(self, me: Worker) -> DecoupledMomentumState:
        return DecoupledMomentumState(namespace(me.params).zeros_like(me.params))

    async def worker(self, me: Worker) -> None:
        while me.training:
            gradient = await me.gradient()
            state: DecoupledMomentumState = me.state
            state.delta *= self.beta
            bound = codec_for(me, self.coding, NoFeedback())
            data = bound.encode_residual(me.lr * gradient, state.delta, me.random)
            total = await self.collective.sum_encoded(me, data, bound, len(gradient), name_of(gradient))
            me.record_round()
            me.optimizer_step(namespace(total).sign(total))
