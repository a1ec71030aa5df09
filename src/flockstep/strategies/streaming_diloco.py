"""Streaming DiLoCo: local steps, overlapped with outer steps on one fragment of the model after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import copied, rounded
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.codecs.identity import Identity
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import CompositionError, ConfigurationError, require
from flockstep.feedback.base import Feedback
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import check_composition
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.encoding import codec_for, encoded
from flockstep.strategies.outer_optimizers.base import OuterOptimizer
from flockstep.strategies.outer_optimizers.nesterov import Nesterov
from flockstep.strategies.resizing import FormerWorker, Resizing, keep


@dataclass
class Fragment:
    """A fragment of the model and the state of its outer optimizer."""

    part: slice
    model: FlatArray
    """The fragment's global parameters after the last outer step, in an array of the fragment's size."""
    outer_state: Any
    given: FlatArray
    """This worker's contribution to the mean in progress: its parameters of the fragment, or its encoded outer
    gradient.
    """
    begun: int = 0
    under_way: bool = False
    dropped: Any = None
    """The feedback memory for this worker's outer gradients of the fragment."""


@dataclass(frozen=True)
class StreamingDiloco(Strategy):
    """Streaming DiLoCo with overlapping communication (Douillard et al. 2025, section 2 and algorithm 2).

    The model is cut into `fragments`. Fragment p is averaged after the steps t with t mod `period` = t_p, the offsets
    t_p being spread evenly, so that no two fragments start at the same step if `period` >= `fragments`. The mean is
    used `overlap` (tau) steps later: the outer optimizer, with a separate state for each fragment, moves the fragment's
    global parameters theta, and the replica takes `alpha` of its own parameters and 1 - alpha of theta. Without overlap
    the replica's parameters are replaced by theta, and with one fragment the strategy is plain DiLoCo. Fragments are
    contiguous and of equal size; the authors take every F-th layer. A mean that is in progress at the end is still
    merged. A lossy `codec` encodes each worker's outer gradient, theta minus its own parameters, with `feedback`.
    """

    period: int = 100
    fragments: int = 4
    overlap: int = 5
    alpha: float = 0.5
    outer_optimizer: OuterOptimizer = field(default_factory=Nesterov)
    collective: Collective = field(default_factory=ByHost)
    codec: Codec = field(default_factory=Identity)
    feedback: Feedback = field(default_factory=NoFeedback)

    def __post_init__(self) -> None:
        for name in ("period", "fragments"):
            require(getattr(self, name) >= 1, name, ">= 1", getattr(self, name), "100 and 4 are usual")
        if not 0 <= self.overlap < self.period:
            raise ConfigurationError(
                f"overlap must be >= 0 steps and below the period {self.period}, got {self.overlap}; use 0 to wait "
                "for the means"
            )
        require(0 <= self.alpha <= 1, "alpha", "in [0, 1]", self.alpha, "0.5 is usual, and 0 uses the mean alone")
        if self.outer_optimizer.resets:
            raise CompositionError(
                f"{self.outer_optimizer} resets the workers' optimizers when the whole model is averaged, but this "
                "strategy averages fragments; use local_sgd, or leave reset out"
            )
        check_composition(self.codec, self.feedback)

    # Every update reaches all workers within a period and the overlap; a dead worker stops all workers.
    traits = Traits(delivery="bounded delay", survives=False, results=("mean", "rank0", "best"))

    @property
    def taxonomy_entry(self) -> TaxonomyEntry:
        """The taxonomy entry of replicas that are averaged; workers wait for a mean only if the mean takes longer than
        the overlap.
        """
        return TaxonomyEntry("decentral", "bounded async" if self.overlap else "sync", "reduce", "dedicated master")

    resizing = Resizing(
        replicas="own",
        also="all workers take the parameters and the outer optimizer of every fragment from worker 0, and a remaining "
        "worker keeps the memory of its feedback, except for fragments whose average not all workers had begun",
    )

    def take_over(self, me: Worker, former: Sequence[FormerWorker]) -> None:
        for index, fragment in enumerate(me.state):
            keep(fragment, former[0].state[index], ("model", "outer_state"))
            self.outer_optimizer.resize(fragment.outer_state, me.workers)
            if me.rank < len(former):
                keep(fragment, former[me.rank].state[index], ("dropped",))

    def forget(self, state: list[Fragment], step: int, least: int) -> None:
        for fragment in state:
            if fragment.under_way and fragment.begun > least:
                fragment.under_way = False
                fragment.dropped = None  # the next delta contains what this one has not sent

    def worker_state(self, me: Worker) -> list[Fragment]:
        """Return the fragments of the model, each with the initial parameters."""
        start, parts = self.outer_optimizer.start, me.fragments(self.fragments)
        fragments = ((part, me.params[part]) for part in parts)
        return [Fragment(part, copied(own), start(own, me.workers), copied(own)) for part, own in fragments]

    def offset(self, index: int) -> int:
        """Return the offset t_p, in steps, of the fragment p = `index`."""
        return index * self.period // self.fragments

    async def worker(self, me: Worker) -> None:
        """Take the worker's steps. After each step, merge the fragment means that are due, then start the averages that
        are due.
        """
        fragments: list[Fragment] = me.state
        for index, fragment in enumerate(fragments):
            if fragment.under_way:  # a run that continues
                me.background(f"fragment{index}", self._mean(me, fragment), "replayed")
        while me.training:
            me.optimizer_step(await me.gradient())
            for index, fragment in enumerate(fragments):
                await self._merge(me, index, fragment, me.step - self.overlap)
                if me.step % self.period == self.offset(index):
                    self._begin(me, index, fragment)
                    await self._merge(me, index, fragment, me.step - self.overlap)

    @property
    def _exact(self) -> bool:
        return self.codec == Identity() and self.feedback == NoFeedback()

    def _begin(self, me: Worker, index: int, fragment: Fragment) -> None:
        """Start averaging this worker's part of a fragment."""
        part = me.params[fragment.part]
        fragment.begun, fragment.under_way = me.step, True
        if self._exact:
            fragment.given = copied(part)
        else:
            delta = fragment.model - part
            fragment.given, fragment.dropped = encoded(
                me, self.codec, self.feedback, delta, fragment.dropped, fragment.part
            )
        me.background(f"fragment{index}", self._mean(me, fragment), "replayed")

    async def _mean(self, me: Worker, fragment: Fragment) -> FlatArray:
        """Return the mean of the workers' parameters, or theta minus the mean of the decoded outer gradients."""
        model = fragment.model
        if self._exact:
            mean = copied(fragment.given)
            await self.collective.average(me, mean)
            return mean
        codec = codec_for(me, self.codec, self.feedback, fragment.part, fragment.begun)
        total = await self.collective.sum_encoded(me, fragment.given, codec, len(model), name_of(model))
        total /= me.workers
        return model - total

    async def _merge(self, me: Worker, index: int, fragment: Fragment, begun: int) -> None:
        """Wait for and merge a mean that was started at step `begun` or earlier, if one is in progress."""
        if not fragment.under_way or fragment.begun > begun:
            return
        mean: FlatArray = await me.finished(me.task(f"fragment{index}"))
        fragment.under_way = False
        self.outer_optimizer.follow(me, fragment.outer_state)
        self.outer_optimizer.move(fragment.model, mean, fragment.outer_state)
        part = me.params[fragment.part]
        if self.overlap and self.alpha:
            alpha = rounded(self.alpha, part)
            part[:] = alpha * part + (1 - alpha) * fragment.model
        else:
            part[:] = fragment.model

    async def finish(self, me: Worker) -> None:
        """Merge the fragment means in progress, then leave the run."""
        for index, fragment in enumerate(me.state):
            await self._merge(me, index, fragment, me.step)
        me.leave()
