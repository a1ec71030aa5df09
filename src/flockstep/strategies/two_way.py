"""Scatter-reduce with a codec in both directions: the gradients are encoded, and so is their mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import slices
from flockstep.codecs.base import Codec
from flockstep.codecs.half import Half
from flockstep.errors import CompositionError
from flockstep.feedback.base import Feedback
from flockstep.feedback.momentum import Momentum
from flockstep.feedback.residual import Residual
from flockstep.feedback.sender import check_composition
from flockstep.nodes import Worker
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.encoding import codec_for, encoded, send_slices
from flockstep.strategies.resizing import Resizing


@dataclass
class Dropped:
    """A worker's state: the feedback memory for each slice of its gradient, and for the mean of the slice that it
    owns.
    """

    gradients: list[Any]
    mean: Any = None


@dataclass(frozen=True)
class TwoWay(Strategy):
    """Error compensation in both directions (1-bit SGD: Seide et al. 2014; DoubleSqueeze: Tang et al. 2019, algorithm
    1).

    Worker i sends slice j of its gradient to worker j, encoded with `codec` and `feedback`. Worker j takes the mean,
    encodes it with the same codec and a separate `feedback`, and sends it to all workers. All workers, the owner
    included, step with the decoded mean, each with the job's optimizer, so that replicas are equal in every bit. With n
    workers and C bytes for K encoded elements, each worker sends about 2(n-1)/n C bytes per step. Seide et al. run
    AdaGrad on the owner before the second encoding; here the optimizer comes after it. A single worker also encodes
    twice.
    """

    codec: Codec = field(default_factory=Half)
    feedback: Feedback = field(default_factory=Residual)

    def __post_init__(self) -> None:
        check_composition(self.codec, self.feedback)
        if isinstance(self.feedback, Momentum):
            raise CompositionError(
                "two_way applies feedback to gradients and to their mean, so momentum in the feedback would act "
                f"twice, got {self.feedback}; use residual, and momentum in the optimizer"
            )

    # Synchronous: a dead worker stops all workers.
    traits = Traits(delivery="synchronous", survives=False, results=("rank0", "mean"), clips="combined")
    taxonomy_entry = TaxonomyEntry("central", "sync", "scatter-reduce", "distributed PS (k = n)")

    resizing = Resizing(also="the memory of the feedback begins at zero, because the slices change")

    def worker_state(self, me: Worker) -> Dropped:
        return Dropped([None] * me.workers)

    async def worker(self, me: Worker) -> None:
        parts = slices(len(me.params), me.workers)
        own = parts[me.rank]
        while me.training:
            gradient = await me.gradient()
            state: Dropped = me.state
            sent = send_slices(me, self.codec, self.feedback, gradient, parts, state.gradients)
            codec = codec_for(me, self.codec, self.feedback, own)
            size, dtype = own.stop - own.start, name_of(gradient)
            pieces = [
                sent if rank == me.rank else await me.receive_array("gradient", rank) for rank in range(me.workers)
            ]
            mean = mean_of([codec.decode(piece, size, dtype) for piece in pieces])
            data, state.mean = encoded(me, self.codec, self.feedback, mean, state.mean, own)
            me.send_all(me.peers, "mean", data)
            total = namespace(gradient).empty_like(gradient)
            for rank, part in enumerate(parts):
                codec = codec_for(me, self.codec, self.feedback, part)
                piece = data if rank == me.rank else await me.receive_array("mean", rank)
                total[part] = codec.decode(piece, part.stop - part.start, dtype)
            me.record_round()
            me.optimizer_step(total)
