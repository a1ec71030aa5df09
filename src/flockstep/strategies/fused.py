"""Synchronous all-reduce SGD with tensor fusion: tensors that are complete on all workers are reduced in one buffer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import ProtocolError, require
from flockstep.expression import SIZED
from flockstep.messages import Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits


class TensorReady(Note, frozen=True):
    """Note sent to worker 0: the index of a tensor whose gradient is complete, or None if the sender has finished a
    buffer.
    """

    tensor: int | None


class NextTensors(Note, frozen=True):
    """Note sent by worker 0: the indices of the tensors to average next."""

    tensors: list[int]


@dataclass(frozen=True)
class Fused(Strategy):
    """Synchronous SGD with tensor fusion (Horovod: Sergeev & Del Balso 2018, section 4).

    A worker tells worker 0 about each tensor whose gradient is complete. Whenever no reduction is running, worker 0
    tells all workers which tensors are complete on every worker, up to `fusion` megabytes (a larger tensor is sent
    alone); the workers copy these tensors into one buffer, average the buffer, and copy the result back. So the order
    is the same on all workers, even if the backward passes complete tensors in different orders. Horovod looks for
    complete tensors every few milliseconds, instead of whenever the last buffer is done. In separate processes, all
    tensors are complete at the same time, after the backward pass.
    """

    notes: ClassVar[Notes] = {"ready/lead": TensorReady, "go/follow": NextTensors}

    fusion: float = field(default=64.0, metadata=SIZED)
    collective: Collective = field(default_factory=ByHost)

    def __post_init__(self) -> None:
        require(self.fusion > 0, "fusion", "> 0 megabytes", self.fusion, "64 is usual")

    # Synchronous: a dead worker stops all workers.
    traits = Traits("synchronous", survives=False, results=("rank0", "mean"), clips="combined")
    taxonomy_entry = TaxonomyEntry("central", "sync", "all-reduce", "replicated PS")

    async def worker(self, me: Worker) -> None:
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
        """Compute a gradient, and tell worker 0 about each tensor as the backward pass completes it."""
        async for part, gradient in me.gradient_parts(me.tensors[::-1]):
            mean[part] = gradient[part]
            me.send(0, "ready/lead", None, TensorReady(me.tensors.index(part)))

    async def _lead(self, me: Worker) -> None:
        """On worker 0: name the tensors that are complete on every worker, one buffer after the other."""
        heard: Counter[int] = Counter()
        ready: list[int] = []
        early: list[TensorReady] = []
        left, busy = len(me.tensors), False
        while left or busy:
            note = (await me.receive("ready")).note
            if (tensor := note.tensor) is not None:
                if heard[tensor] == me.workers:  # belongs to the next step, which its sender has begun already
                    early.append(note)
                    continue
                heard[tensor] += 1
                ready += [tensor] if heard[tensor] == me.workers else []
            else:
                busy = False
            if ready and not busy:
                batch = self._fused(me, ready)
                ready, left, busy = ready[len(batch) :], left - len(batch), True
                me.send_all(range(me.workers), "go/follow", None, NextTensors(batch))
        for note in early:
            me.send(0, "ready/lead", None, note)

    def _fused(self, me: Worker, ready: list[int]) -> list[int]:
        """Return as many of the `ready` tensors, from the first on, as fit into one buffer; at least one."""
        nbytes = np.cumsum([(me.tensors[i].stop - me.tensors[i].start) * me.params.itemsize for i in ready])
        return ready[: max(1, int(np.searchsorted(nbytes, self.fusion * 1e6, side="right")))]

    async def _follow(self, me: Worker, mean: FlatArray) -> None:
        """Average the buffers that worker 0 names until all tensors are averaged."""
        left = len(me.tensors)
        while left:
            named = (await me.receive("go", 0)).note.tensors
            if not all(0 <= i < len(me.tensors) for i in named):
                raise ProtocolError(
                    f"worker 0 named the tensors {named}, but there are only tensors 0 to {len(me.tensors) - 1}"
                )
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
                me.send(0, "ready/lead", None, TensorReady(None))
