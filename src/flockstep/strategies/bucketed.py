"""Synchronous all-reduce SGD in buckets, whose reductions overlap with the backward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flockstep.arrays.namespace import copied, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.errors import ConfigurationError, require
from flockstep.expression import SIZED
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing


@dataclass(frozen=True)
class Bucketed(Strategy):
    """Synchronous SGD as PyTorch's DistributedDataParallel does it (Li et al. 2020, section 3.2).

    The gradient is cut into buckets of `cap` megabytes, from its end, where the backward pass begins; the first bucket
    holds `first` megabytes, so that communication starts early. Each bucket is averaged in the background as soon as it
    is complete, in order; the optimizer steps once all buckets are averaged. `accumulate` batches make one step (DDP's
    no_sync): their gradients are summed locally and averaged once. Buckets are cut by size alone, through tensors if
    necessary. In a script's own loop with PyTorch, buckets are sent while the backward pass runs: call `step()` after
    every backward pass, and do not change the gradients between the two. Under `flockstep train`, the whole gradient
    exists before the first bucket is sent, so that buckets overlap only with each other.
    """

    cap: float = field(default=25.0, metadata=SIZED)
    first: float = field(default=1.0, metadata=SIZED)
    accumulate: int = 1
    collective: Collective = field(default_factory=ByHost)

    def __post_init__(self) -> None:
        for name in ("cap", "first"):
            if not 0 < getattr(self, name) < math.inf:
                got = getattr(self, name)
                raise ConfigurationError(f"{name} must be > 0 megabytes and finite, got {got}; 25 and 1 are usual")
        require(
            self.accumulate >= 1, "accumulate", ">= 1 batches", self.accumulate, "use 1 for a step after each batch"
        )

    # Synchronous where every step exchanges: a dead worker stops all workers.
    traits = Traits("synchronous", survives=False, results=("rank0", "mean"), clips="combined")
    taxonomy_entry = TaxonomyEntry("central", "sync", "all-reduce", "replicated PS")

    @property
    def resizing(self) -> Resizing:
        return Resizing(
            also="gradients that were accumulated for an unfinished step are dropped", steps_at_end=self.accumulate > 1
        )

    def worker_state(self, me: Worker) -> GradientAccumulator:
        return GradientAccumulator()

    async def worker(self, me: Worker) -> None:
        held: GradientAccumulator = me.state
        while me.training:
            if held.count < self.accumulate - 1:
                held.add(await me.gradient())
                continue
            mean, tasks = namespace(me.params).empty_like(me.params), []
            async for part, gradient in me.gradient_parts(buckets(len(me.params), me.params.itemsize, self)):
                mean[part] = held.with_last(gradient, part)
                tasks.append(me.background(f"bucket{part.start}", self.collective.average(me, mean[part])))
            for task in tasks:
                await me.finished(task)
            held.clear()
            me.record_round(self.accumulate)
            me.optimizer_step(mean)

    async def finish(self, me: Worker) -> None:
        """Average and apply the accumulated gradients of an incomplete last step, then leave the run."""
        held: GradientAccumulator = me.state
        if held.total is not None:
            mean = held.total / held.count
            await self.collective.average(me, mean)
            me.record_round(held.count)
            me.optimizer_step(mean)
            held.clear()
        me.leave()


@dataclass
class GradientAccumulator:
    """Sum and number of the gradients that have been accumulated for the current step."""

    total: FlatArray | None = None
    count: int = 0

    def add(self, gradient: FlatArray) -> None:
        """Add a gradient to the sum, and count it."""
        self.total = copied(gradient) if self.total is None else self.total + gradient
        self.count += 1

    def with_last(self, gradient: FlatArray, part: slice) -> FlatArray:
        """Return the mean of the accumulated gradients and the step's last gradient, on one slice of the array."""
        mean: FlatArray = gradient[part]
        if self.total is not None:
            mean = (self.total[part] + mean) / (self.count + 1)
        return mean

    def clear(self) -> None:
        """Reset the accumulated sum and number after a step."""
        self.total, self.count = None, 0


def buckets(size: int, itemsize: int, sizes: Bucketed) -> list[slice]:
    """Return the buckets of a gradient of `size` elements as slices, beginning with the end of the gradient."""
    stop, cap = size, sizes.first
    parts = []
    while stop > 0:
        start = max(0, stop - max(1, int(cap * 1e6) // itemsize))
        parts.append(slice(start, stop))
        stop, cap = start, sizes.cap
    return parts
