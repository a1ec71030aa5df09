"""Steps by common consent of all ranks: uneven numbers of batches, and gradients that overflowed on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from flockstep.arrays.namespace import beside
from flockstep.collectives.exchange import broadcast_on_tree
from flockstep.collectives.ring import Ring
from flockstep.drivers.loop import Loop
from flockstep.errors import CompositionError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.nodes import Worker

Remember = Callable[[int], None]
"""Lets every rank's optimizer remember what that of a rank does."""


class Consent:
    """What the ranks of a launched script agree on before each step, where the strategy has them go in step.

    Strategies that do without a worker (`Traits.survives`) need no consent: there each rank may stop or skip alone.
    """

    def __init__(self, flat: FlatModule, loop: Loop):
        self._flat = flat
        self._loop = loop
        traits = loop.strategy.traits
        self._combined = traits.clips != "own"
        self._on_workers = not traits.server_optimizer
        self._needed = loop.workers > 1 and not traits.survives
        self._joining = self._by_active = False
        self.shadowing = False
        """This rank has run out of batches, and takes part in the steps of the others."""
        self.share = 1.0
        """What the combined gradient has to be multiplied by on the workers."""

    def skips(self, overflow: bool | None) -> bool:
        """Whether no rank may take this step, since a gradient overflowed; `overflow` None: no scaler looked for it."""
        if not self._needed or not (self._joining or overflow is not None):
            return bool(overflow)
        active, overflows = self._count("join" if self._joining else "scaler", 1, int(overflow or False))
        self._weigh(active)
        return overflows > 0

    @contextmanager
    def join(self, step: Callable[[], None], remember: Remember | None, by_active: bool) -> Iterator[None]:
        """Ranks that reach the end of the context first take part in the steps of the others until all are there."""
        if self._joining:
            raise CompositionError("join() is open already; leave it before it is entered again")
        self._by_active, self._joining = by_active, True
        try:
            yield
            if self._needed:
                self._shadow(step, remember)
        finally:
            self._joining = self.shadowing = False
            self.share = 1.0

    def _shadow(self, step: Callable[[], None], remember: Remember | None) -> None:
        steps = 0
        self.shadowing = True
        while True:
            active, overflows = self._count("join", 0, 0)
            if not active:
                break
            if not overflows:
                self._weigh(active)
                self._flat.zero_grad()
                step()
                steps += 1
        if self._combined and remember is not None:
            self._copy_from_the_last(steps, remember)

    def _weigh(self, active: int) -> None:
        """Divide by the ranks that have batches, where all ranks' number was divided by."""
        self.share = 1.0
        if self._by_active and self._combined:
            self.share = self._loop.workers / max(active, 1)
            if not self._on_workers:
                self._flat.grads *= self.share

    def _count(self, name: str, *values: int) -> tuple[int, ...]:
        return tuple(map(round, self._sum(name, values)))

    def _sum(self, name: str, values: Sequence[float]) -> list[float]:
        """The sums over all ranks."""

        async def program(me: Worker) -> list[float]:
            array = beside(np.array(values, np.float32), me.params)
            await Ring().all_reduce(me, array)
            return [float(value) for value in array]

        return self._loop.exchange(name, program)

    def _copy_from_the_last(self, shadowed: int, remember: Remember) -> None:
        """As DDP does: parameters, and what the optimizer remembers, from the lowest rank that shadowed no step."""
        whole = self._sum("last", [rank == self._loop.rank and shadowed == 0 for rank in range(self._loop.workers)])
        if all(whole):
            return
        source = next(rank for rank, found in enumerate(whole) if found)
        self._loop.exchange("final", lambda me: broadcast_on_tree(me, self._flat.params, source))
        if self._loop.watch is not None:
            self._loop.watch.note()
        remember(source)
