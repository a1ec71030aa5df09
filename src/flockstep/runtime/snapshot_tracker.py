"""Selects and evaluates the model of a run whose nodes store snapshots in files, with only one model in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Engine
from flockstep.messages import Address
from flockstep.records.snapshots import LAST, Snapshot, SnapshotJoiner
from flockstep.runtime.node_metrics import Emit
from flockstep.runtime.part_group import by_worker, tracked
from flockstep.runtime.plan import Plan
from flockstep.runtime.tracker import FINAL, Tick, Tracker

PART = 1 << 20
"""Number of parameters read at a time when several snapshots are summed."""


class SnapshotParameters(dict[Address, Any]):
    """Node → its snapshot, as which `values` gives it, or its parameters, which are read from the file at every
    access.
    """

    def __getitem__(self, address: Address) -> FlatArray:
        parameters: FlatArray = super().__getitem__(address).read()
        return parameters


class SnapshotTick(Tick):
    """The parameters that all nodes sent at one tick of progress, read from the files of their snapshots."""

    def __init__(self, missing: set[Address]):
        super().__init__(missing)
        self.files = SnapshotParameters()
        self.kept = self.files
        self._variance: float | None = None

    def add_snapshot(self, item: Snapshot, samples: int, served: bool = False) -> None:
        """Add the parameters that a node has sent for this tick, a point of progress at which the run is evaluated.

        `served`: whether the progress of the servers counts.
        """
        self.files[item.address] = item
        self.t = max(self.t, item.seconds)
        self.missing.discard(item.address)
        if item.address >= 0 or served:
            self.workers += 1
            self.steps += item.step
            self.samples += samples
            self.sent += item.sent_bytes

    def replicas(self) -> list[Snapshot]:
        """The workers' snapshots, in order of rank."""
        return [item for address, item in sorted(self.files.items()) if address >= 0]

    def first(self) -> FlatArray | None:
        """The replica of the first worker that is present; None if there is none."""
        replicas = self.replicas()
        return replicas[0].read() if replicas else None

    def mean(self) -> FlatArray:
        """Return the mean of the replicas (K,). The call also sums the distances from the mean, which `divergence`
        needs.
        """
        replicas = self.replicas()
        mean: FlatArray = np.empty(replicas[0].size, replicas[0].read(slice(0, 0)).dtype)
        self._variance = self._add_up(replicas, mean)
        return mean

    def divergence(self) -> float:
        """Root mean square distance of the replicas from their mean."""
        if self._variance is None:
            self._variance = self._add_up(self.replicas(), None)
        return math.sqrt(max(self._variance, 0.0))

    def _add_up(self, replicas: Sequence[Snapshot], mean: FlatArray | None) -> float:
        variance = 0.0
        for start in range(0, replicas[0].size, PART):
            part, sums = slice(start, start + PART), Tick(set())
            for item in replicas:
                sums.add_worker(item.read(part), 0, 0)
            variance += sums.variance()
            if mean is not None:
                mean[part] = sums.mean()
        return variance


class NewestSnapshots:
    """The most recent snapshot of each node, from which the model of a run that ends early is made."""

    def __init__(self, parts: int = 1) -> None:
        """`parts`: number of workers that hold one replica together, whose snapshots become one of the replica."""
        self._items: dict[Address, Snapshot] = {}
        self._parts = parts
        self._joiner = SnapshotJoiner(parts)

    def take(self, item: Snapshot) -> None:
        """Store a node's snapshot that was sent between evaluations, or its final snapshot."""
        for whole in self._joiner.add(item):
            self._items[whole.address] = whole

    def buffers(self, part: int = 0) -> dict[Address, FlatArray | None]:
        """Replica → bytes of the final buffers of the worker that holds `part` of it, for those that have ended."""
        final = [item.of_part(part) for address, item in self._items.items() if address >= 0 and item.tick is None]
        return {item.address // self._parts: item.read_buffers() if item.buffers else None for item in final}

    def tick(
        self, lost: Collection[Address], samples: Callable[[int], int] = lambda step: 0, served: bool = False
    ) -> SnapshotTick:
        """Return the most recent snapshots of all nodes as one tick; replicas of lost workers are left out if there are
        replicas of other workers. `served`: see `add_snapshot`.
        """
        ranks = {address for address in self._items if address >= 0}
        left_out = ranks & set(lost) if ranks - set(lost) else set()
        tick = SnapshotTick(set())
        for address, item in self._items.items():
            if address not in left_out:
                tick.add_snapshot(item, samples(item.step), served)
        return tick


Keep = Callable[[SnapshotTick, FlatArray, dict[str, FlatArray]], None]
"""Stores the final model: its tick, its parameters, and its buffers by name."""


class SnapshotTracker(Tracker):
    """Evaluates the model of each tick of progress when the snapshots of all nodes have arrived, and stores the final
    model with `keep`.
    """

    def __init__(self, engine: Engine, plan: Plan, emit: Emit, keep: Keep):
        sizes = (engine.schema.size,) if plan.split is None else plan.split.sizes
        facts = *tracked(plan, sizes), plan.samples_at, by_worker(emit, len(sizes)), plan.strategy.traits.served
        super().__init__(engine, plan.result, *facts)
        self._parts, self._joiner = len(sizes), SnapshotJoiner(len(sizes))
        self._keep = keep
        self._newest = NewestSnapshots()
        self._final: list[Snapshot] = []
        self._lost: set[Address] = set()

    def add_snapshot(self, item: Snapshot) -> None:
        """Store a node's snapshot, and evaluate the ticks that are now complete."""
        for whole in self._joiner.add(item):
            self._add_whole(whole)

    def _add_whole(self, item: Snapshot) -> None:
        if self._served and item.address >= 0:
            return
        if item.tick is None or item.tick == LAST:
            self._newest.take(item)
        if item.tick is None and item.address >= 0:
            self._final.append(item)
        if item.tick == LAST or item.address in self._idle:
            return
        tick = FINAL if item.tick is None else item.tick
        if self._repeats(item.address, tick):
            return
        entry = self._ticks.setdefault(tick, SnapshotTick(set(self._alive)))
        assert isinstance(entry, SnapshotTick)
        samples = self._samples(item.step) * (self._cluster.workers if self._served else 1)
        entry.add_snapshot(item, samples, self._served)
        for earlier in [one for one in self._ticks if one < tick]:
            self._ticks[earlier].missing.discard(item.address)  # a node's ticks only increase
        self._evaluate_complete()

    def lose(self, address: Address) -> None:
        """Stop waiting for the snapshots of a lost node."""
        address = address // self._parts if address >= 0 else address
        self._lost.add(address)
        super().lose(address)

    def give_up(self) -> None:
        """Remove the snapshots that wait for those of nodes which no longer send them."""
        for entry in self._ticks.values():
            assert isinstance(entry, SnapshotTick)
            for item in entry.files.values():
                if item.tick is not None and item.tick != LAST:  # others are written again under their names
                    item.remove()

    def end(self) -> None:
        """Determine and evaluate the result of the run, whether or not the run finished."""
        if self._latest < FINAL:
            self._ticks[FINAL] = self._newest.tick(self._lost, self._samples, self._served)
            self._evaluate(FINAL)
        for item in self._final:
            self._evaluate_own(item.address, item.read(), item.seconds)

    def _evaluate(self, tick: float) -> None:
        entry = self._ticks[tick]
        assert isinstance(entry, SnapshotTick)
        for item in entry.replicas():
            if item.buffers:
                self._engine.restore_buffers(item.address, item.read_buffers().view(np.float64))
        try:
            super()._evaluate(tick)
        finally:
            for item in entry.files.values():
                if item.tick is not None and item.tick != LAST:
                    item.remove()

    def _chosen(self, tick: float, entry: Tick, params: FlatArray) -> None:
        assert isinstance(entry, SnapshotTick)
        if tick == FINAL:
            self._keep(entry, params, self._buffers_of(entry, params))
