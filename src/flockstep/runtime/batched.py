"""Computes the gradients of several workers of one process together, when the first of the gradients is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from flockstep.arrays.namespace import empty, namespace, take_rows
from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Engine, Indices, TrainedModel
from flockstep.nodes import Node
from flockstep.programs import NeedGradient
from flockstep.runtime.plan import Batches, Plan, computed
from flockstep.workloads.sampler import SamplerState

ROWS = 64
"""Number of gradients in one batched call: enough to amortize the call, few enough to stay in the cache."""


class ReplicaGradients(ABC):
    """The replicas of all workers, with their batches and gradients; row r of `params` (n, K) belongs to worker r."""

    def __init__(self, model: TrainedModel, plan: Plan):
        n = plan.cluster.workers
        initial = model.initial()
        self.params = namespace(initial).tile(initial, (n, 1))
        self.batches = [Batches(plan, rank) for rank in range(n)]
        self.losses = [0.0] * n
        self.nodes: dict[int, Node] = {}
        """Rank → worker."""
        self._plan = plan

    def restart(self, rank: int, state: dict[int, tuple[SamplerState, int]]) -> None:
        """Continue drawing a worker's batches at a saved `state`."""
        self.batches[rank] = Batches(self._plan, rank)
        self.batches[rank].restore(state)

    @abstractmethod
    def ask(self, rank: int, need: NeedGradient) -> int:
        """Request a worker's gradient at its current parameters; return the number of samples."""

    @abstractmethod
    def keep(self, rank: int) -> None:
        """Compute the gradient that worker `rank` has requested, if any, because the worker's parameters may change
        afterwards.
        """

    @abstractmethod
    def forget(self, rank: int) -> None:
        """Cancel the pending gradient request of one worker."""

    @abstractmethod
    def take(self, rank: int) -> FlatArray:
        """Return the gradient (K,) that a worker has requested; the array is valid until the worker's next request."""


class BatchedGradients(ReplicaGradients):
    """Gradients of unsplit models, computed together when the first of the gradients is needed."""

    def __init__(self, engine: Engine, plan: Plan):
        super().__init__(engine, plan)
        self._engine = engine
        self._batch = plan.batch
        self._pool = _Pool(self.params[0])
        self._needs: dict[int, tuple[NeedGradient, Indices]] = {}

    def ask(self, rank: int, need: NeedGradient) -> int:
        self._pool.give_back(rank)
        indices = self.batches[rank].next(need)
        self._needs[rank] = need, indices
        return len(indices)

    def forget(self, rank: int) -> None:
        self._needs.pop(rank, None)

    def keep(self, rank: int) -> None:
        """Compute all requested gradients now if worker `rank` has requested one, because the worker's parameters may
        change afterwards.
        """
        if rank in self._needs:
            self._compute()

    def take(self, rank: int) -> FlatArray:
        if rank in self._needs:
            self._compute()
        return self._pool.row(rank)

    def _compute(self) -> None:
        """Compute all requested gradients; requests with equal numbers of samples are computed together."""
        needs, self._needs = self._needs, {}
        alike: dict[int, list[int]] = {}
        for rank in sorted(needs):
            need, indices = needs[rank]
            if need.samples or need.teachers or need.layers:
                self._compute_alone(rank, need, indices)
            else:
                alike.setdefault(len(indices), []).append(rank)
        for size in sorted(alike):
            ranks = alike[size]
            for start in range(0, len(ranks), ROWS):
                self._compute_together(ranks[start : start + ROWS], needs)

    def _compute_together(self, ranks: list[int], needs: dict[int, tuple[NeedGradient, Indices]]) -> None:
        steps = [self.nodes[rank].step for rank in ranks]
        indices = np.concatenate([needs[rank][1] for rank in ranks]).reshape(len(ranks), len(needs[ranks[0]][1]))
        params = self._pool.gather(self.params, ranks)
        losses = self._engine.gradients(params, indices, self._pool.take(ranks), ranks, steps)
        for rank, loss in zip(ranks, losses.tolist(), strict=True):
            self.losses[rank] = loss

    def _compute_alone(self, rank: int, need: NeedGradient, indices: Indices) -> None:
        out = self._pool.take([rank])[0]
        self.losses[rank] = computed(self._engine, need, self.params[rank], indices, out, rank, self.nodes[rank].step)


class _Pool:
    """Slabs of `ROWS` rows. A slab is reused when all its rows have been given back.

    New memory for every batch would cost more than the gradients themselves, because each page of it is zeroed first.
    """

    def __init__(self, like: FlatArray):
        """`like`: an array of one row's size and dtype."""
        self._like = like
        self._free: list[_Slab] = []
        self._open = _Slab(empty(like, ROWS, len(like)))
        self._held: dict[int, tuple[_Slab, FlatArray]] = {}
        self._gathered = empty(like, ROWS, len(like))

    def gather(self, params: FlatArray, ranks: Sequence[int]) -> FlatArray:
        """Copy those rows of `params` (n, K) into one array."""
        return take_rows(params, ranks, self._gathered[: len(ranks)])

    def take(self, ranks: Sequence[int]) -> FlatArray:
        """Rows for the gradients of at most `ROWS` ranks, in that order.

        Each row is held until its rank gives it back.
        """
        slab = self._room_for(len(ranks))
        rows = slab.rows[slab.used : slab.used + len(ranks)]
        slab.used += len(ranks)
        slab.held += len(ranks)
        for rank, row in zip(ranks, rows, strict=True):
            self._held[rank] = slab, row
        return rows

    def row(self, rank: int) -> FlatArray:
        """The gradient of rank `rank`."""
        return self._held[rank][1]

    def give_back(self, rank: int) -> None:
        """Release the row of rank `rank`, which no longer uses its gradient."""
        held = self._held.pop(rank, None)
        if held is not None:
            slab = held[0]
            slab.held -= 1
            if slab.held == 0 and slab is not self._open:
                self._free.append(slab)

    def _room_for(self, count: int) -> _Slab:
        """The slab that is being filled, or the next slab if there is no room."""
        slab = self._open
        if slab.held == 0:
            slab.used = 0
        if slab.used + count > ROWS:
            if slab.held == 0:
                self._free.append(slab)
            slab = self._open = self._free.pop() if self._free else _Slab(empty(self._like, ROWS, len(self._like)))
            slab.used = 0
        return slab


class _Slab:
    __slots__ = ("held", "rows", "used")

    def __init__(self, rows: FlatArray):
        self.rows = rows
        self.used = 0
        self.held = 0
