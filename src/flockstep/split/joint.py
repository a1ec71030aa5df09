"""Replicas that PyTorch divides over several processes, with FSDP2 or tensor parallelism, and their programs in virtual
time: there a replica is computed whole, and what its processes compute and exchange takes time and bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.ring import Ring
from flockstep.frameworks.base import Engine, Indices
from flockstep.partitions.base import JointPartition
from flockstep.split.program import NeedPass, NeedRequest, PartProgram, PartRun, Ways, resumed
from flockstep.split.stages import SplitModel


@dataclass(frozen=True)
class WayExchange:
    """A collective operation of all processes of a replica."""

    kind: Literal["gather", "scatter", "sum"]
    """"gather": each process gives its piece of an array to all; "scatter": each gets its piece of the sum of arrays;
    "sum": all get the sum.
    """
    nbytes: float
    """Size of the whole array."""

    def sent(self, ways: int) -> float:
        """Return the number of bytes that each of the processes sends in a ring."""
        return (2 if self.kind == "sum" else 1) * self.nbytes * (ways - 1) / ways


@dataclass(frozen=True)
class Timeline:
    """What each process of a replica does in a step."""

    work: tuple[float | WayExchange, ...]
    """In order: computations, as fractions of the work of the whole model's gradient, and exchanges."""
    saved_bytes: float
    """Size of the activations that a process keeps for its backward pass."""


class WholeReplica:
    """One replica, whose gradient is computed as a whole for all of its parts."""

    def __init__(self, engine: Engine, rank: int):
        self._engine, self._rank, self.params, self._loss = engine, rank, engine.initial(), 0.0
        self._gradient = np.zeros_like(self.params)
        self._taken = 0
        """Number of parts that have taken their gradient of the step."""

    def gradient(self, span: slice, parts: int, step: int, indices: Indices) -> tuple[FlatArray, float]:
        """Return the gradient of one of the parts, and the loss. All parts have given the step's parameters before, and
        none begins the next step's gradient before all have taken this one, because each exchanges with all others.
        """
        if not self._taken:
            self._loss = self._engine.gradient(self.params, indices, self._gradient, self._rank, step)
        self._taken = (self._taken + 1) % parts
        return self._gradient[span], self._loss


def spans(sizes: Sequence[int]) -> list[slice]:
    """Return the elements of each part in the flat array of the engine."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


@dataclass(frozen=True, eq=False)
class JointModel(SplitModel):
    """A job whose model PyTorch divides over the processes of a replica."""

    partition: JointPartition
    replicas: dict[int, WholeReplica] = field(default_factory=dict, kw_only=True)
    """The replicas of a run in virtual time."""

    @abstractmethod
    def timeline(self, samples: int) -> Timeline:
        """Return what a process does for a batch of so many samples."""

    @property
    def microbatches(self) -> int:
        return self.partition.shares

    def largest_message(self, batch: int) -> int:
        """Return 0, because PyTorch moves what the parts exchange."""
        return 0


class JointWay(PartProgram):
    """One process of one replica in virtual time."""

    def __init__(self, run: PartRun, model: JointModel):
        super().__init__(run, model.parts[run.number])
        self._model, self._span = model, spans(model.sizes)[run.number]
        if run.number == 0 or run.rank not in model.replicas:
            model.replicas[run.rank] = WholeReplica(model.engine, run.rank)
        self._replica, self._collective = model.replicas[run.rank], Ring()
        self._group = Ways(len(model.parts), run, self.mailbox)

    def requested(self, params: FlatArray) -> None:
        self._replica.params[self._span] = params

    async def program(self) -> None:
        await resumed(NeedRequest())
        for step in range(self._run.taken, self._run.steps):
            indices = self._run.batch()
            for work in self._model.timeline(len(indices)).work:
                if isinstance(work, WayExchange):
                    await self._exchange(work)
                else:
                    await resumed(NeedPass(step, work, len(indices)))
            self.gradient[:], self.loss = self._replica.gradient(self._span, self._group.workers, step, indices)
            await resumed(NeedRequest())

    async def _exchange(self, work: WayExchange) -> None:
        """Send arrays of the sizes that travel."""
        dtype = self.gradient.dtype
        pieces = self._group.workers if work.kind == "gather" else 1
        array = np.zeros(max(1, round(work.nbytes / pieces / dtype.itemsize)), dtype)
        match work.kind:
            case "gather":
                await self._collective.all_gather(self._group, array)
            case "scatter":
                await self._collective.reduce_scatter(self._group, array)
            case "sum":
                await self._collective.all_reduce(self._group, array)
