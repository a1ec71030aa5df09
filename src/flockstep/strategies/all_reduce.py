"""Synchronous all-reduce SGD: every step applies the mean gradient of all workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import zeros
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
from flockstep.strategies.bucketed import Bucketed, buckets
from flockstep.strategies.encoding import codec_for, encoded
from flockstep.strategies.overlap_trial import OverlapTrial
from flockstep.strategies.resizing import Resizing

SIZES = Bucketed(cap=8.0, first=1.0)
"""Sizes, in megabytes, of the buckets in which gradients are sent."""
AHEAD = 16
"""Number of elements of the buffer in front of the mean. The last of them is a flag that is sent with the mean. With 16
elements, the mean begins at a cache line.
"""


@dataclass
class AllReduceState:
    """A worker's state: the memory of its error feedback, and whether gradients are sent while the backward pass
    runs.
    """

    memory: Any = None
    overlaps: bool = True
    """Whether gradients may be sent while the backward pass runs. False once the script has changed gradients after the
    backward pass.
    """
    trial: OverlapTrial = field(default_factory=OverlapTrial)
    """Measured times of steps with and without overlap of backward pass and messages, from which the worker chooses the
    faster kind.
    """


@dataclass(frozen=True)
class AllReduce(Strategy):
    """Synchronous all-reduce SGD (Baidu 2017; Sergeev & Del Balso 2018): every step applies the mean of all gradients.

    Every worker computes w ← w - η · (1/n) Σ g_i. The replicas are equal in every bit after every step. With a lossy
    `codec`, each worker encodes its g_i once, with `feedback`, and `collective` sums the decoded values: with a linear
    codec during the reduction, with other codecs after every worker has received all n encodings, which takes n-1 times
    the bytes of one encoding.

    In a script's own loop with PyTorch, if not all workers share memory, gradients without a codec are sent in buckets,
    from the second step on, either while the backward pass runs or after it: the workers time both, and use the faster.
    The buckets are the same in both cases, so the bits do not depend on the choice. A script may still change its
    gradients before `step()`: the workers then exchange the changed gradients, and from then on exchange gradients only
    in `step()`.
    """

    collective: Collective = field(default_factory=ByHost)
    codec: Codec = field(default_factory=Identity)
    feedback: Feedback = field(default_factory=NoFeedback)

    def __post_init__(self) -> None:
        check_composition(self.codec, self.feedback)

    # Synchronous: a dead worker stops all workers.
    traits = Traits(delivery="synchronous", survives=False, results=("rank0", "mean"), clips="combined")
    taxonomy_entry = TaxonomyEntry("central", "sync", "all-reduce", "replicated PS")

    resizing = Resizing(own=("memory",))

    @property
    def steps_alone(self) -> bool:
        return type(self).worker is AllReduce.worker and self._exact

    @property
    def _exact(self) -> bool:
        """Whether gradients are exchanged as they are."""
        return self.codec == Identity() and self.feedback == NoFeedback()

    def worker_state(self, me: Worker) -> AllReduceState:
        return AllReduceState()

    async def worker(self, me: Worker) -> None:
        kept: AllReduceState = me.state
        exact, scratch, before = self._exact, None, me.now()
        while me.training:
            tried = me.overlaps and kept.overlaps and me.params.nbytes > SIZES.first * 1e6
            if not exact:
                gradient = await self._mean(me, await me.gradient())
            elif not tried:
                gradient = await me.gradient()
                if me.workers > 1:
                    await self.collective.divided_sum(me, gradient, me.workers)
            else:
                scratch = me.shared.empty(len(me.params) + AHEAD, me.params) if scratch is None else scratch
                overlaps = kept.trial.next or not me.step
                gradient = await (self._overlapped(me, scratch) if overlaps else self._afterwards(me, scratch))
            me.record_round()
            me.optimizer_step(gradient, in_place=tried)
            if tried and kept.overlaps:
                before = await self._timed(me, before)

    async def _overlapped(self, me: Worker, scratch: FlatArray) -> FlatArray:
        """Return the mean of all workers' gradients, exchanged in buckets while the rest of them is computed.

        `scratch` (K+AHEAD,) holds the mean behind a number that is not zero if a worker's gradient was revised.
        """
        kept: AllReduceState = me.state
        pieces, whole = buckets(len(me.params), me.params.itemsize, SIZES), slice(0, len(me.params))
        sent, mean = scratch[AHEAD - 1 :], scratch[AHEAD:]
        first, tasks = not me.step, []
        async for part, gradient in me.gradient_parts([whole] if first else pieces, tentative=True):
            for piece in pieces if first else [part]:
                if piece.start:
                    averaging = self.collective.average_of(me, gradient[piece], mean[piece])
                else:
                    sent[0], mean[piece] = me.revised, gradient[piece]
                    averaging = self.collective.average(me, sent[: piece.stop + 1])
                tasks.append(me.background(f"bucket{piece.start}", averaging))
        for task in tasks:
            await me.finished(task)
        me.revised = False
        if sent[0]:
            kept.overlaps = False
            mean[:] = gradient
            await self.collective.average(me, mean)
        return mean

    async def _afterwards(self, me: Worker, scratch: FlatArray) -> FlatArray:
        """Return the mean of all workers' gradients, exchanged after the backward pass, with the bits of `_overlapped`.

        The order in which a collective adds depends on the place of an element in its bucket. Therefore the bucket at
        the start of the array follows a number here too. `scratch` (K+AHEAD,) has room for this bucket.
        """
        gradient, sent = await me.gradient(), scratch[AHEAD - 1 :]
        for piece in buckets(len(me.params), me.params.itemsize, SIZES):
            values = gradient[piece]
            if not piece.start:
                sent[0], sent[1 : piece.stop + 1] = 0, values
                values = sent[: piece.stop + 1]
            await self.collective.average(me, values)
            if not piece.start:
                gradient[piece] = values[1:]
        return gradient

    async def _timed(self, me: Worker, before: float) -> float:
        """Count the step that began at `before`, and choose when gradients travel if it is due; return the time."""
        kept: AllReduceState = me.state
        if kept.trial.stepped(me.now() - before):
            times = zeros(me.params, 2, dtype="float32")
            times[0], times[1] = kept.trial.during, kept.trial.after
            await self.collective.average(me, times)
            kept.trial.choose(float(times[0]), float(times[1]))
        kept.trial = kept.trial.renewed()
        return me.now()

    async def _mean(self, me: Worker, gradient: FlatArray) -> FlatArray:
        """Return the mean of all workers' decoded gradients."""
        kept: AllReduceState = me.state
        data, kept.memory = encoded(me, self.codec, self.feedback, gradient, kept.memory)
        codec = codec_for(me, self.codec, self.feedback)
        total = await self.collective.sum_encoded(me, data, codec, len(gradient), name_of(gradient))
        total /= me.workers
        return total
