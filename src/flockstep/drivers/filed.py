"""The model of a run whose nodes hand in files: chosen and evaluated with one model in memory, however many nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.account import Emit
from flockstep.drivers.plan import Plan
from flockstep.drivers.tracker import FINAL, Tick, Tracker
from flockstep.frameworks.base import Engine
from flockstep.messages import Address
from flockstep.records.handed_in import LAST, HandedIn

PART = 1 << 20
"""Parameters that are read at a time where those of several nodes are added up."""


class Files(MutableMapping[Address, FlatArray]):
    """Node → its parameters, read from its file whenever they are asked for."""

    def __init__(self) -> None:
        self.items_of: dict[Address, HandedIn] = {}

    def __getitem__(self, address: Address) -> FlatArray:
        return self.items_of[address].read()

    def __setitem__(self, address: Address, params: FlatArray) -> None:
        raise TypeError("parameters in files are handed in, not set")

    def __delitem__(self, address: Address) -> None:
        del self.items_of[address]

    def __iter__(self) -> Iterator[Address]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class FiledTick(Tick):
    """A tick whose parameters lie in files."""

    def __init__(self, missing: set[Address]):
        super().__init__(missing)
        self.files = Files()
        self.kept = self.files
        self._variance: float | None = None

    def hand_in(self, item: HandedIn, samples: int) -> None:
        """Take note of a node's file."""
        self.files.items_of[item.address] = item
        self.t = max(self.t, item.t)
        self.missing.discard(item.address)
        if item.address >= 0:
            self.workers += 1
            self.steps += item.step
            self.samples += samples
            self.sent += item.sent

    def replicas(self) -> list[HandedIn]:
        """The workers' files, by rank."""
        return [item for address, item in sorted(self.files.items_of.items()) if address >= 0]

    def first(self) -> FlatArray | None:
        """The replica of the first worker that is there."""
        replicas = self.replicas()
        return replicas[0].read() if replicas else None

    def mean(self) -> FlatArray:
        """The mean replica; its distances are kept for `divergence`."""
        replicas = self.replicas()
        mean: FlatArray = np.empty(replicas[0].size, replicas[0].read(slice(0, 0)).dtype)
        self._variance = self._add_up(replicas, mean)
        return mean

    def divergence(self) -> float:
        """Root mean square distance of the replicas from their mean."""
        if self._variance is None:
            self._variance = self._add_up(self.replicas(), None)
        return math.sqrt(max(self._variance, 0.0))

    def _add_up(self, replicas: Sequence[HandedIn], mean: FlatArray | None) -> float:
        variance = 0.0
        for start in range(0, replicas[0].size, PART):
            part, sums = slice(start, start + PART), Tick(set())
            for item in replicas:
                sums.add_worker(item.read(part), 0, 0)
            variance += sums.variance()
            if mean is not None:
                mean[part] = sums.mean()
        return variance


class Newest:
    """What each node handed in last: the model that a run has when it ends before its time."""

    def __init__(self) -> None:
        self._items: dict[Address, HandedIn] = {}

    def take(self, item: HandedIn) -> None:
        """A node handed in its parameters outside of the evaluations, or its final ones."""
        self._items[item.address] = item

    def buffers(self) -> dict[Address, FlatArray | None]:
        """The bytes of every worker's buffers at its end, among those whose program has ended."""
        final = [item for address, item in self._items.items() if address >= 0 and item.tick is None]
        return {item.address: item.read_buffers() if item.buffers else None for item in final}

    def tick(self, lost: Collection[Address], samples: Callable[[int], int] = lambda step: 0) -> FiledTick:
        """All of it as one tick, without the replicas of lost workers as long as there are others."""
        ranks = {address for address in self._items if address >= 0}
        left_out = ranks & set(lost) if ranks - set(lost) else set()
        tick = FiledTick(set())
        for address, item in self._items.items():
            if address not in left_out:
                tick.hand_in(item, samples(item.step))
        return tick


class FiledTracker(Tracker):
    """Evaluates each tick once all nodes' files of it are there, and gives the model at the end to `keep`."""

    def __init__(self, engine: Engine, plan: Plan, emit: Emit, keep: Callable[[FiledTick, FlatArray], None]):
        super().__init__(engine, plan.result, plan.cluster, plan.held(engine.schema.size), plan.samples_at, emit)
        self._keep = keep
        self._newest = Newest()
        self._final: list[HandedIn] = []
        self._lost: set[Address] = set()

    def hand_in(self, item: HandedIn) -> None:
        """Take note of a node's file; evaluate the ticks that wait for nobody else."""
        if item.tick is None or item.tick == LAST:
            self._newest.take(item)
        if item.tick is None and item.address >= 0:
            self._final.append(item)
        if item.tick == LAST or item.address in self._idle:
            return
        tick = FINAL if item.tick is None else item.tick
        entry = self._ticks.setdefault(tick, FiledTick(set(self._alive)))
        assert isinstance(entry, FiledTick)
        entry.hand_in(item, self._samples(item.step))
        for earlier in [one for one in self._ticks if one < tick]:
            self._ticks[earlier].missing.discard(item.address)  # no node goes back
        self._evaluate_complete()

    def lose(self, address: Address) -> None:
        """Wait for this node no more."""
        self._lost.add(address)
        super().lose(address)

    def end(self) -> None:
        """Settle what the result of the run is, and evaluate it, whether or not the run came to its end."""
        if self._latest < FINAL:
            self._ticks[FINAL] = self._newest.tick(self._lost, self._samples)
            self._evaluate(FINAL)
        for item in self._final:
            self._evaluate_own(item.address, item.read(), item.t)

    def _evaluate(self, tick: float) -> None:
        entry = self._ticks[tick]
        assert isinstance(entry, FiledTick)
        for item in entry.replicas():
            if item.buffers:
                self._engine.restore_buffers(item.address, item.read_buffers().view(np.float64))
        try:
            super()._evaluate(tick)
        finally:
            for item in entry.files.items_of.values():
                if item.tick is not None and item.tick != LAST:
                    item.remove()

    def _chosen(self, tick: float, entry: Tick, params: FlatArray) -> None:
        assert isinstance(entry, FiledTick)
        if tick == FINAL:
            self._keep(entry, params)
