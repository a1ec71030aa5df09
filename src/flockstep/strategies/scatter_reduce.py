"""Scatter-reduce: every worker is a synchronous server for 1/n of the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.arrays.kernels import name_of
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.identity import Identity
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import check_composition
from flockstep.messages import Note, Notes
from flockstep.nodes import Worker
from flockstep.optimizers.base import OptimizerState, norm
from flockstep.optimizers.clipped import Clipped
from flockstep.strategies.aggregations import Aggregation, Mean
from flockstep.strategies.aggregations.requirements import check_slices
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.encoding import codec_for, send_slices
from flockstep.strategies.resizing import FormerWorker, Resizing, take_slice


@dataclass
class SliceState:
    """A worker's state: the optimizer state of the worker's own slice, and the feedback memory for each slice."""

    optimizer: OptimizerState
    errors: list[FlatArray | None]


class SquaredNorm(Note, frozen=True):
    """Note sent between workers: the sum of the squares of the elements in the sender's slice of the combined
    gradient.
    """

    value: float


@dataclass(frozen=True)
class ScatterReduce(Strategy):
    """Synchronous SGD with the server's work divided among the workers, k = n (BigDL: Dai et al. 2019, section 3.3;
    CaffeOnSpark).

    Worker i sends slice j of g_i to worker j. Worker j averages the n slices in order of rank, steps its slice of w
    with the job's optimizer, whose state for that slice no other worker keeps, and broadcasts the slice. With n workers
    and K parameters of s bytes, all workers together send 2(n-1)Ks bytes per step, in 2(n-1) messages per worker; each
    worker sends 2(n-1)/n Ks bytes if n divides K. The result equals that of a parameter server under bulk synchronous
    parallel in every bit. `codec` encodes the gradients, and `aggregation` takes the place of the mean, as in a
    parameter server. The optimizer's state is sharded as in ZeRO's stage 1 (Rajbhandari et al. 2020, section 5.1). To
    clip a gradient by its whole norm, workers exchange the squared norms of their slices. If all workers share memory,
    they read the slices of unencoded gradients and of w in shared memory, in the same order. In this strategy, an
    `aggregation` withstands wrong gradients, but not a hostile worker: every worker owns 1/n of the model and sends its
    slice unchecked.
    """

    codec: Codec = field(default_factory=Identity)
    feedback: Feedback = field(default_factory=NoFeedback)
    aggregation: Aggregation = field(default_factory=Mean)

    def __post_init__(self) -> None:
        check_slices(self.aggregation, self.codec, slices=0)
        check_composition(self.codec, self.feedback)

    # Synchronous: the slice of a dead worker is lost.
    traits = Traits(
        delivery="synchronous",
        survives=False,
        results=("rank0", "mean"),
        server_optimizer=True,
        clips="combined",
        memory="slices",
    )
    notes: ClassVar[Notes] = {"norm": SquaredNorm}
    taxonomy_entry = TaxonomyEntry("central", "sync", "scatter-reduce", "distributed PS (k = n)")

    def check(self, workers: int) -> None:
        self.aggregation.check(workers)

    resizing = Resizing(
        also="the state of the optimizer is cut into the new slices; the memory of the feedback begins at zero"
    )

    @property
    def sums(self) -> bool:
        return (self.codec, self.feedback, self.aggregation) == (Identity(), NoFeedback(), Mean())

    def take_over(self, me: Worker, former: Sequence[FormerWorker]) -> None:
        state: SliceState = me.state
        part = slices(len(me.params), me.workers)[me.rank]
        take_slice(state.optimizer, part, [one.state.optimizer for one in former])

    def worker_state(self, me: Worker) -> SliceState:
        assert me.optimizer is not None
        own = slices(len(me.params), me.workers)[me.rank]
        return SliceState(me.optimizer.init_slice(me.params, own), [None] * me.workers)

    async def worker(self, me: Worker) -> None:
        """Compute a gradient, send its slices to their owners, average and step this worker's slice, and receive the
        other slices.
        """
        parts = slices(len(me.params), me.workers)
        own = me.params[parts[me.rank]]
        while me.training:
            gradient = await me.gradient()
            summed = me.shared.mean_of_slice(gradient) if self.sums else None
            mean = await self._combined(me, gradient, parts) if summed is None else summed
            state: SliceState = me.state
            assert me.optimizer is not None
            optimizer = me.optimizer
            if isinstance(optimizer, Clipped):
                mean, optimizer = optimizer.scaled(mean, await self._norm(me, mean)), optimizer.optimizer
            optimizer.step(own, mean, state.optimizer, me.lr)
            if summed is None:
                me.send_all(me.peers, "slice", own)
                for rank in me.peers:
                    me.params[parts[rank]] = (await me.receive("slice", rank)).payload
            else:
                me.shared.exchange_slices(own, me.params)
            me.record_round()

    async def _combined(self, me: Worker, gradient: FlatArray, parts: list[slice]) -> FlatArray:
        """Return this worker's slice of the combined gradient, exchanged by messages."""
        state: SliceState = me.state
        own = parts[me.rank]
        sent = send_slices(me, self.codec, self.feedback, gradient, parts, state.errors)
        pieces = [sent if rank == me.rank else await self._piece(me, rank) for rank in range(me.workers)]
        codec = codec_for(me, self.codec, self.feedback, own)
        decoded = [codec.decode(piece, own.stop - own.start, name_of(gradient)) for piece in pieces]
        return self.aggregation.combine(decoded).vector

    async def _norm(self, me: Worker, mean: FlatArray) -> float:
        """Return the norm of the whole combined gradient, with the same bits on every worker."""
        squares = {me.rank: norm(mean) ** 2}
        me.send_all(me.peers, "norm", None, SquaredNorm(squares[me.rank]))
        for rank in me.peers:
            squares[rank] = (await me.receive("norm", rank)).note.value
        return math.sqrt(sum(squares[rank] for rank in sorted(squares)))

    async def _piece(self, me: Worker, rank: int) -> Bytes:
        return (await me.receive("gradient", rank)).payload
