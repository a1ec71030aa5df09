"""Lets faults happen to a simulation."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from flockstep.messages import Address, Message
from flockstep.nodes import Cluster
from flockstep.simulation import units
from flockstep.simulation.compute import Clock
from flockstep.simulation.faults import Dies, Drops, Fault, Narrows, Slows


class Mishaps:
    """The faults of one run: which messages get lost, when who dies, how long gradients and messages take then."""

    def __init__(self, faults: Sequence[Fault], cluster: Cluster):
        for fault in faults:
            fault.check(cluster)
        self.drops = {(f.source, f.to, f.nth) for f in faults if isinstance(f, Drops)}
        self._slows = [f for f in faults if isinstance(f, Slows)]
        self._deaths = [f for f in faults if isinstance(f, Dies)]
        self._narrows = [f for f in faults if isinstance(f, Narrows)]
        self._sent: Counter[tuple[Address, Address]] = Counter()

    def deaths(self) -> list[tuple[float, Address, bool]]:
        """When a node dies, and (True) when the others hear of it."""
        events = []
        for fault in self._deaths:
            at = units.duration(fault.at)
            events += [(at, fault.node, False), (at + units.duration(fault.noticed), fault.node, True)]
        return sorted(events, key=lambda event: event[0])

    def narrowings(self) -> list[tuple[float, Address, float]]:
        """When a node's link gets a which-th of its bandwidth; several faults of one node multiply."""
        times = {(units.duration(end), fault.node) for fault in self._narrows for end in (fault.at, fault.until)}
        events = []
        for t, node in sorted(times):
            factors = [fault.factor for fault in self._narrows if fault.node == node and fault.strikes(t)]
            events.append((t, node, math.prod(factors)))
        return events

    def lost(self, to: Address, message: Message) -> bool:
        """Whether this message gets lost; to be asked once for each that is sent."""
        if not self.drops or message.array is None:
            return False
        link = message.source, to
        self._sent[link] += 1
        return (*link, self._sent[link]) in self.drops

    def clock(self, clock: Clock) -> Clock:
        """The clock with the slow workers' gradients stretched."""
        return _Stretched(clock, self._slows) if self._slows else clock


class _Stretched(Clock):
    def __init__(self, clock: Clock, slows: Sequence[Slows]):
        self._clock = clock
        self._slows = slows

    def finish(self, rank: int, t: float, stretch: float = 1.0) -> float:
        """The undisturbed clock's, of a gradient that takes longer."""
        return self._clock.finish(rank, t, stretch * math.prod(fault.stretch(rank, t) for fault in self._slows))
