"""Fair links: messages that leave a node at the same time share its network card, as TCP connections do, and queue at
the receiver.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from flockstep.errors import ConfigurationError
from flockstep.messages import Address
from flockstep.nodes import Cluster
from flockstep.simulation import units
from flockstep.simulation.network import Fabric, Hop, Link, Network, Route, Routing, Transit, cards

BACKLOG, SECONDS = 65536.0, 0.01
"""Limits of the bytes of one connection that wait in the queue of its network card: number of bytes, and seconds in
which they leave. Linux limits both for TCP.
"""
CLOSE = 1e-3
"""Fraction of a message's bytes that may still be left when the message counts as sent."""
_TAG = int.from_bytes(b"fair", "big")


@dataclass(frozen=True)
class FairLink(Network):
    """A network like `link`, except that messages that leave a node at the same time share its network card, as TCP
    connections do.

    The shares are those of connections that take turns packet by packet, times a random factor for each message:
    lognormal with sigma `spread`; with 0, the shares are equal. Up to `backlog` bytes of a message wait in the card's
    queue: at most as many as leave within 10 ms, and at most as many as have already left. These bytes leave before the
    first byte of a message that is sent to another node later. At the receiver, bytes from several senders queue in
    order of arrival. Between two nodes messages keep their order. Durations are exact to one thousandth.
    """

    bandwidth: str | float
    latency: str | float = 0.0
    spread: float = 0.25
    backlog: float = BACKLOG

    def __post_init__(self) -> None:
        units.bandwidth(self.bandwidth)
        units.duration(self.latency, "latency")
        if not 0 <= self.spread < math.inf:
            raise ConfigurationError(
                f"spread must be >= 0 and finite, got {self.spread:g}; 0.25 is usual, 0 gives all connections equal "
                "shares"
            )
        if not 0 <= self.backlog < math.inf:
            raise ConfigurationError(
                f"backlog must be >= 0 bytes and finite, got {self.backlog:g}; {BACKLOG:g} is usual, 0 lets a message "
                "share the card from its first byte"
            )

    def start(self, cluster: Cluster) -> Fabric:
        """Create a network with two hops between any two nodes: the sender's egress, which messages share, and the
        receiver's ingress, where messages queue.
        """
        bandwidth = units.bandwidth(self.bandwidth)
        if math.isinf(bandwidth):  # nothing to share
            return Link(bandwidth, self.latency).start(cluster)
        egress, ingress = cards(cluster, bandwidth)

        between = ((units.duration(self.latency), bandwidth),)

        def route(source: Address, to: Address) -> Route:
            return ((egress[source], ingress[to]), between) if source != to else ((), ())

        return Shared(route, self.spread, self.backlog)


class _Stream:
    """Messages from one node to another; the first leaves at `rate` bytes per second and has `left` bytes to go."""

    __slots__ = ("begins", "egress", "ingress", "left", "rate", "waiting", "weight")

    def __init__(self, egress: Hop, ingress: Hop) -> None:
        self.egress = egress
        self.ingress = ingress
        self.waiting: deque[Transit] = deque()
        self.left = 0.0
        self.rate = 0.0
        self.weight = 1.0
        self.begins = 0.0
        """Time at which the bytes that wait in the card's queue before the stream's first byte have left."""

    def ahead(self, transit: Transit) -> float:
        """Bytes that have to leave before a message has left completely."""
        place = self.waiting.index(transit)
        return self.left + sum(one.nbytes for one in itertools.islice(self.waiting, 1, place + 1))


class Shared(Fabric):
    """The routes of a `FairLink`, with two hops each: messages share the first hop, and queue at the second.

    Bytes flow between events; a message is checked again at the earliest time at which it can have left.
    """

    def __init__(self, route: Routing, spread: float, backlog: float) -> None:
        super().__init__(route)
        self._spread = spread
        self._backlog = backlog
        self._random = np.random.default_rng(_TAG)
        self._streams: dict[tuple[Address, Address], _Stream] = {}
        self._busy: dict[tuple[Address, Address], _Stream] = {}
        self._queued: dict[Hop, float] = {}
        self._now = 0.0

    def depart(self, source: Address, to: Address, nbytes: int, t: float) -> Transit:
        hops, gaps = self._route(source, to)
        transit = Transit(source, to, nbytes, t, hops, gaps, not hops)
        if transit.done:
            return transit
        self._flow(t)
        pair = source, to
        stream = self._streams.get(pair)
        if stream is None:
            stream = self._streams[pair] = _Stream(*transit.hops)
        stream.waiting.append(transit)
        if len(stream.waiting) == 1:
            stream.begins = t + self._queue_of(stream.egress)
            self._busy[pair] = stream
            self._begin(stream)
        transit.time = t + stream.ahead(transit) / stream.egress.full
        return transit

    def advance(self, transit: Transit) -> None:
        now = transit.time
        self._flow(now)
        pair = transit.source, transit.to
        stream = self._streams[pair]
        if stream.waiting[0] is transit and stream.left <= CLOSE * transit.nbytes:
            stream.waiting.popleft()
            if stream.waiting:
                self._begin(stream)
            else:
                del self._busy[pair]
                self._divide(stream.egress)
            behind = self._queued.get(stream.ingress, 0.0) / stream.ingress.bandwidth
            transit.time, transit.done = now + behind + transit.gaps[0][0], True
            return
        least = max(stream.ahead(transit), CLOSE * transit.nbytes) / stream.egress.full
        transit.time = max(now + least, math.nextafter(now, math.inf))

    def narrow(self, node: Address, others: Iterable[Address], factor: float) -> None:
        super().narrow(node, others, factor)
        for stream in self._busy.values():
            self._divide(stream.egress)

    def _queue_of(self, card: Hop) -> float:
        """Seconds in which the bytes that wait in a card's queue leave.

        A connection's queue grows as its bytes are acknowledged, by no more than these bytes.
        """
        most = min(self._backlog, SECONDS * card.bandwidth)
        mine = (one for one in self._busy.values() if one.egress is card)
        return sum(min(most, one.left, one.waiting[0].nbytes - one.left) for one in mine) / card.bandwidth

    def _begin(self, stream: _Stream) -> None:
        """Start sending the first message of a stream."""
        stream.left = float(stream.waiting[0].nbytes)
        stream.weight = math.exp(self._spread * self._random.standard_normal())
        self._divide(stream.egress)

    def _divide(self, egress: Hop) -> None:
        """Divide a card's bandwidth over the streams that leave through it."""
        mine = [stream for stream in self._busy.values() if stream.egress is egress]
        begun = [stream for stream in mine if stream.begins <= self._now]
        weights = sum(stream.weight for stream in begun)
        for stream in mine:
            stream.rate = 0.0
        for stream in begun:
            stream.rate = egress.bandwidth * stream.weight / weights

    def _flow(self, t: float) -> None:
        """Let bytes leave and arrive until time `t`."""
        while t > self._now:
            waiting = [stream for stream in self._busy.values() if self._now < stream.begins <= t]
            first = min((stream.begins for stream in waiting), default=t)
            self._pass(first - self._now)
            self._now = first
            for stream in waiting:
                if stream.begins == first:
                    self._divide(stream.egress)

    def _pass(self, passed: float) -> None:
        """Let bytes leave and arrive for `passed` seconds in which no stream begins."""
        for hop, queued in self._queued.items():
            self._queued[hop] = queued - passed * hop.bandwidth
        for stream in self._busy.values():
            left = min(stream.left, passed * stream.rate)
            stream.left -= left
            self._queued[stream.ingress] = self._queued.get(stream.ingress, -passed * stream.ingress.bandwidth) + left
        for hop, queued in self._queued.items():
            self._queued[hop] = max(0.0, queued)
