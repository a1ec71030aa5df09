"""Agreement of all ranks before each step, if they have different numbers of batches or a gradient overflows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np

from flockstep.arrays.namespace import to_device_of
from flockstep.collectives.exchange import broadcast_on_tree
from flockstep.collectives.ring import Ring
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.nodes import Worker
from flockstep.runtime.loop import Loop

SAME = 1e-5
"""Relative difference up to which two learning rates, summed in float32, count as equal."""
Remember = Callable[[int], None]
"""Function that copies the optimizer state of the given rank to every rank."""


class Consent:
    """Agreement of a script's ranks before each step, for strategies whose ranks step together.

    Strategies that continue without a worker that has left (`Traits.in_step` false) need no agreement: each rank may
    stop or skip alone.
    """

    _live: ClassVar[weakref.WeakSet[Consent]] = weakref.WeakSet()
    """Those of all distributed optimizers of this process whose ranks proceed in step."""

    def __init__(self, flat: FlatModule, loop: Loop):
        self._flat = flat
        self._loop = loop
        traits = loop.strategy.traits
        self._combined = traits.clips != "own"
        self._on_workers = not traits.server_optimizer
        self._alike = traits.alike
        self._needed = not loop.alone and traits.in_step
        if self._needed:
            self._live.add(self)
        self.joining = self._by_active = False
        """Whether the steps are inside of `join`."""
        self.shadowing = False
        """Whether this rank has no more batches and takes part in the steps of the others."""
        self.share = 1.0
        """Factor for the combined gradient on the workers."""

    def skips(self, overflow: bool | None) -> bool:
        """Return whether all ranks skip the step because one overflowed; `overflow` is None without a scaler."""
        if not self._needed or not (self.joining or overflow is not None):
            return bool(overflow)
        lr = self._loop.lr
        active, overflows, rates = self._sum("join" if self.joining else "scaler", [1, bool(overflow), lr])
        if self.joining and self._alike and abs(rates - active * lr) > SAME * abs(rates):
            raise ConfigurationError(
                f"worker {self._loop.rank} steps with learning rate {lr:g}, but the mean of the workers is "
                f"{rates / active:g}, so their parameters would differ; workers with fewer batches have stepped the "
                "learning-rate schedule less often: step the schedule once per epoch"
            )
        self._weigh(active)
        return overflows > 0

    @contextmanager
    def join(
        self,
        step: Callable[[], None],
        remember: Remember | None,
        by_active: bool,
        stepped: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """Context manager in which ranks may have different numbers of batches.

        A rank that reaches the end takes part in the steps of the other ranks until all have reached it. If `stepped`
        returns False, because the rank took no step, as in an evaluation, the rank continues at once.
        """
        if self.joining:
            raise CompositionError("join() is already open; leave its with block before entering join() again")
        live = [one for one in self._live if not one._loop.finished]
        if self._needed and len(live) > 1:
            raise CompositionError(
                "a rank without batches can take part in the steps of only one optimizer, but this script has "
                f"{len(live)} whose ranks step together; give every rank the same number of batches (flockstep.shard "
                "does this) without join() and private=True, or call finish() on the other optimizers first"
            )
        self._by_active, self.joining = by_active, True
        try:
            yield
            if self._needed and stepped():
                self._shadow(step, remember)
        finally:
            self.joining = self.shadowing = False
            self.share = 1.0

    def _shadow(self, step: Callable[[], None], remember: Remember | None) -> None:
        steps = 0
        self.shadowing = True
        while True:
            active, overflows, _ = self._sum("join", [0, 0, 0])
            if not active:
                break
            if not overflows:
                self._weigh(active)
                self._flat.drop_gradients()
                self._flat.gather_gradients()
                step()
                steps += 1
        if self._combined and remember is not None:
            self._copy_from_the_last(steps, remember)

    def _weigh(self, active: float) -> None:
        """Correct the divisor of the mean from the number of all ranks to that of ranks with batches."""
        self.share = 1.0
        if self._by_active and self._combined:
            self.share = self._loop.workers / max(active, 1)
            if not self._on_workers:
                self._flat.grads *= self.share

    def _sum(self, name: str, values: Sequence[float]) -> list[float]:
        """Sums over all ranks."""

        async def program(me: Worker) -> list[float]:
            array = to_device_of(np.array(values, np.float32), me.params)
            await Ring().all_reduce(me, array)
            return [float(value) for value in array]

        return self._loop.exchange(name, program)

    def _copy_from_the_last(self, shadowed: int, remember: Remember) -> None:
        """Copy parameters and optimizer state from the lowest rank that had batches to the end, as DDP does."""
        whole = self._sum("last", [rank == self._loop.rank and shadowed == 0 for rank in range(self._loop.workers)])
        if all(whole):
            return
        source = next(rank for rank, found in enumerate(whole) if found)
        self._loop.exchange("final", lambda me: broadcast_on_tree(me, self._flat.params, source))
        if self._loop.watch is not None:
            self._loop.watch.note()
        remember(source)
