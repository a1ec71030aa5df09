"""All-reduce of whatever tensors are ready on everyone, fused into one buffer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.expression import SIZED
from flockstep.messages import Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits


class News(Note, frozen=True):
    """A tensor that is complete, by index; None: worker 0 is done with a buffer."""

    tensor: int | None


class Named(Note, frozen=True):
    """The tensors to average next, by index."""

    tensors: list[int]


@dataclass(frozen=True)
class Fused(Strategy):
    """Synchronous SGD with tensor fusion (Horovod: Sergeev & Del Balso 2018, section 4).

    A worker tells worker 0 of each tensor whose gradient is complete. Whenever nothing is being reduced, worker 0 names
    the tensors that are complete on everyone by then, up to `fusion` megabytes (a larger tensor travels alone), to all
    workers, which copy them into one buffer, average it and copy it back. So the order is the same everywhere, in
    whichever order backward completes tensors on each. The original looks every few milliseconds instead of whenever
    the last buffer is done. In processes of their own all tensors are complete at once: after backward.
    """

    notes: ClassVar[Notes] = {"news/lead": News, "go/follow": Named}

    fusion: float = field(default=64.0, metadata=SIZED)
    collective: Collective = field(default_factory=Ring)

    def __post_init__(self) -> None:
        if not self.fusion > 0:
            raise ConfigurationError(f"fusion must be > 0 megabytes, got {self.fusion}; 64 is usual")

    # Synchronous; a dead worker stops everyone.
    traits = Traits(1, survives=False, results=("rank0", "mean"), clips="combined")
    cell = Cell("central", "sync", "all-reduce", "replicated PS")

    async def worker(self, me: Worker) -> None:
        """Announce each tensor as it is complete; step when all are averaged."""
        while me.training:
            mean = namespace(me.params).empty_like(me.params)
            follower = me.background("follow", self._follow(me, mean))
            if me.rank == 0:
                me.background("lead", self._lead(me))
            await self.announce(me, mean)
            await me.finished(follower)
            me.record_round()
            me.optimizer_step(mean)

    async def announce(self, me: Worker, mean: FlatArray) -> None:
        """Compute; tell worker 0 of each tensor in the order in which backward completes them."""
        async for part, gradient in me.gradient_parts(me.tensors[::-1]):
            mean[part] = gradient[part]
            me.send(0, "news/lead", None, News(me.tensors.index(part)))

    async def _lead(self, me: Worker) -> None:
        """Worker 0: name what is complete on everyone, one buffer after the other."""
        heard: Counter[int] = Counter()
        ready: list[int] = []
        early: list[News] = []
        left, busy = len(me.tensors), False
        while left or busy:
            note = (await me.receive("news")).note
            if (tensor := note.tensor) is not None:
                if heard[tensor] == me.workers:  # of the next step: its sender knew before that this one was over
                    early.append(note)
                    continue
                heard[tensor] += 1
                ready += [tensor] if heard[tensor] == me.workers else []
            else:
                busy = False
            if ready and not busy:
                batch = self._fused(me, ready)
                ready, left, busy = ready[len(batch) :], left - len(batch), True
                me.send_all(range(me.workers), "go/follow", None, Named(batch))
        for note in early:
            me.send(0, "news/lead", None, note)

    def _fused(self, me: Worker, ready: list[int]) -> list[int]:
        """As many of these tensors, from the first on, as one buffer takes; at least one."""
        nbytes = np.cumsum([(me.tensors[i].stop - me.tensors[i].start) * me.params.itemsize for i in ready])
        return ready[: max(1, int(np.searchsorted(nbytes, self.fusion * 1e6, side="right")))]

    async def _follow(self, me: Worker, mean: FlatArray) -> None:
        """Average what worker 0 names, until every tensor has been."""
        left = len(me.tensors)
        while left:
            named = (await me.receive("go", 0)).note.tensors
            if not all(0 <= i < len(me.tensors) for i in named):
                raise ProtocolError(f"worker 0 named the tensors {named}; there are 0 to {len(me.tensors) - 1}")
            parts = [me.tensors[i] for i in named]
            buffer = namespace(mean).concatenate([mean[part] for part in parts])
            await self.collective.average(me, buffer)
            start = 0
            for part in parts:
                size = part.stop - part.start
                mean[part] = buffer[start : start + size]
                start += size
            left -= len(parts)
            if me.rank == 0:
                me.send(0, "news/lead", None, News(None))
