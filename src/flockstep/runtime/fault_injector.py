"""Injects faults into a simulation, and wrong gradients into real runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from flockstep.arrays.schema import FlatArray
from flockstep.messages import Address, Message
from flockstep.nodes import Cluster
from flockstep.simulation import units
from flockstep.simulation.attacks import Memory, WrongGradient
from flockstep.simulation.compute import Clock
from flockstep.simulation.faults import Dies, Drops, Fault, Narrows, Slows
from flockstep.simulation.network import Fabric
from flockstep.simulation.queue import EventQueue


class FaultInjector:
    """The faults of one run: lost messages, deaths, and durations of gradients and messages."""

    def __init__(self, faults: Sequence[Fault], cluster: Cluster):
        for fault in faults:
            fault.check(cluster)
        self._processes = cluster.processes
        self.drops = {(f.source, f.to, f.nth) for f in faults if isinstance(f, Drops)}
        self._slows = [f for f in faults if isinstance(f, Slows)]
        self._deaths = [f for f in faults if isinstance(f, Dies)]
        self._narrows = [f for f in faults if isinstance(f, Narrows)]
        self._sent: Counter[tuple[Address, Address]] = Counter()

    def narrow_at_start(self, fabric: Fabric) -> None:
        """Check that the links whose bandwidth faults reduce can be narrowed, and apply the faults that begin at second
        0.
        """
        for t, node, factor in reversed(self._narrowings()):
            fabric.narrow(node, self._processes, 1.0 if t else factor)

    def schedule(
        self,
        queue: EventQueue[Callable[[], None]],
        fabric: Fabric,
        die: Callable[[Address], None],
        notice: Callable[[Address], None],
    ) -> None:
        """Schedule the changes of bandwidth and the deaths of nodes. `die` is called with the address of a node that
        dies, and `notice` later, when the other nodes are notified.
        """
        for t, node, factor in self._narrowings():
            queue.schedule(t, partial(fabric.narrow, node, self._processes, factor))
        for t, node, noticed in self._deaths_and_notices():
            queue.schedule(t, partial(notice if noticed else die, node))

    def _deaths_and_notices(self) -> list[tuple[float, Address, bool]]:
        """Virtual seconds of deaths (False), and of the times at which the other nodes are notified of them (True)."""
        events = []
        for fault in self._deaths:
            at = units.duration(fault.at)
            events += [(at, fault.node, False), (at + units.duration(fault.noticed), fault.node, True)]
        return sorted(events, key=lambda event: event[0])

    def _narrowings(self) -> list[tuple[float, Address, float]]:
        """Virtual seconds, nodes, and factors by which the bandwidth of a node's link is divided; the factors of
        several faults multiply.
        """
        times = {(units.duration(end), fault.node) for fault in self._narrows for end in (fault.at, fault.until)}
        events = []
        for t, node in sorted(times):
            factors = [fault.factor for fault in self._narrows if fault.node == node and fault.active(t)]
            events.append((t, node, math.prod(factors)))
        return events

    def lost(self, to: Address, message: Message) -> bool:
        """Return whether the network loses this message to node `to`; call this exactly once for each message that is
        sent.
        """
        if not self.drops or message.array is None:
            return False
        link = message.source, to
        self._sent[link] += 1
        return (*link, self._sent[link]) in self.drops

    def clock(self, clock: Clock) -> Clock:
        """Return a clock that lengthens the gradients of slow workers; `clock` itself if no worker is slow."""
        return _Stretched(clock, self._slows) if self._slows else clock


class WrongGradients:
    """Changes the gradients of one worker."""

    def __init__(self, faults: Sequence[WrongGradient]):
        self.memories = [Memory() for _ in faults]
        """What each fault keeps between two gradients."""
        self._faults = faults

    def change(self, gradient: FlatArray, step: int, part: slice, hostile: bool) -> None:
        """Apply the faults of gradient number `step` to a part of the gradient, in place.

        Args:
            gradient: the whole flat gradient (K,).
            step: number of the gradient, from 0.
            part: the slice of the array that has been computed.
            hostile: apply the hostile faults, after the worker's own checks; otherwise the accidental faults, before
                the checks.
        """
        piece = gradient[part]
        for fault, memory in zip(self._faults, self.memories, strict=True):
            if fault.hostile == hostile:
                fault.watch(piece, memory, part)
                if fault.active(step):
                    fault.change(piece, memory, part)


def wrong_gradients(faults: Sequence[Fault], rank: int) -> WrongGradients | None:
    """Return the faults among `faults` that change the gradients of worker `rank`; None if there are none."""
    own = [fault for fault in faults if isinstance(fault, WrongGradient) and fault.worker == rank]
    return WrongGradients(own) if own else None


def remaining_faults(
    faults: Sequence[Fault], steps: Mapping[int, int], ranks: Mapping[int, int]
) -> list[WrongGradient]:
    """Return the wrong gradients that have not yet occurred in a run that continues with another number of workers.

    Args:
        faults: the faults of the run so far.
        steps: number of gradients of each worker, as the faults count them.
        ranks: former rank → new rank of the workers that remain.
    """
    own = [fault for fault in faults if isinstance(fault, WrongGradient) and fault.worker in ranks]
    return [later for fault in own if (later := fault.after(steps[fault.worker], ranks[fault.worker])) is not None]


class _Stretched(Clock):
    def __init__(self, clock: Clock, slows: Sequence[Slows]):
        self.fixed = clock.fixed
        self._clock = clock
        self._slows = slows

    def begin(self, rank: int, t: float, stretch: float = 1.0) -> None:
        """Begin a gradient on the undisturbed clock, with its duration stretched."""
        self._clock.begin(rank, t, stretch * math.prod(fault.stretch(rank, t) for fault in self._slows))

    def due(self, rank: int, t: float, share: float = 1.0) -> float:
        return self._clock.due(rank, t, share)

    def drop(self, rank: int, t: float) -> None:
        self._clock.drop(rank, t)

    def handle(self, t: float, seconds: float) -> float:
        return self._clock.handle(t, seconds)
