"""Models the time that nodes spend on messages and steps in addition to gradients: handling, encoding, decoding,
adding, optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import add

from flockstep.errors import require
from flockstep.messages import HEADER_BYTES, Address
from flockstep.nodes import Cluster, Hosts
from flockstep.simulation.compute import Wrapper
from flockstep.simulation.network import Fabric, Network, Transit


@dataclass(frozen=True)
class Overheads:
    """Seconds that a node spends on messages and steps, in addition to gradients."""

    message: float = 0.0
    """Seconds per message, at the sender and at the receiver."""
    receive: float = 0.0
    """Seconds per byte of payload that a worker receives, for decoding and adding."""
    serve: float = 0.0
    """Seconds per byte of payload that a server receives."""
    step: float = 0.0
    """Seconds per step of a worker in addition to the gradient, for the optimizer and for encoding."""
    copy: float = 0.0
    """Seconds per byte of payload that a node sends or receives, while the network carries the byte."""


@dataclass(frozen=True)
class Longer(Wrapper):
    """A compute model that adds `extra` seconds to each gradient of another model, for example for the optimizer and
    for encoding.
    """

    extra: float

    def __post_init__(self) -> None:
        _time(self.extra, "extra")

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        return (seconds + self.extra for seconds in self.base.stream(seed, rank))


@dataclass(frozen=True)
class Handled(Network):
    """A network whose nodes handle messages one after another, and in which a byte of payload counts as `factor` bytes.

    A node spends `message` seconds on each message that it sends or receives. In addition, a worker spends `receive`
    seconds, and a server `serve` seconds, on each byte of payload that it receives. While the network carries a
    message, either end spends `copy` seconds on each byte of payload, which delay the message only if no core is free.
    Where gradients share cores by time slicing, all these seconds are taken from the cores.
    """

    network: Network
    message: float = 0.0
    receive: float = 0.0
    serve: float = 0.0
    factor: float = 1.0
    copy: float = 0.0

    def __post_init__(self) -> None:
        for name in ("message", "receive", "serve", "copy"):
            _time(getattr(self, name), name)
        require(0 < self.factor < math.inf, "factor", "> 0 and finite", f"{self.factor:g}", "leave it out for 1")

    def start(self, cluster: Cluster) -> Fabric:
        """Return the hops of the wrapped network, between the processors of two nodes."""
        return _Handled(self.network.start(cluster), self)

    def hosts(self, workers: int) -> Hosts:
        return self.network.hosts(workers)


def _time(seconds: float, name: str) -> None:
    require(0 <= seconds < math.inf, name, ">= 0 seconds and finite", f"{seconds:g}", "leave it out for none")


class _Begun(Transit):
    """A message that its sender handles before the network carries it."""

    carried: Transit | None = None


class _Handled(Fabric):
    def __init__(self, fabric: Fabric, work: Handled) -> None:
        self._inner = fabric
        self._work = work
        self._sending: dict[Address, float] = {}
        self._receiving: dict[Address, float] = {}
        self._handle: Callable[[float, float], float] = add

    def handle_with(self, handle: Callable[[float, float], float]) -> None:
        self._handle = handle

    def depart(self, source: Address, to: Address, nbytes: int, t: float) -> Transit:
        payload = round((nbytes - HEADER_BYTES) * self._work.factor)
        heavy, copying = HEADER_BYTES + payload, self._work.copy * payload
        if source == to or not (self._work.message or self._work.copy):
            return self._received(self._inner.depart(source, to, heavy, t), t)
        begin = max(t, self._sending.get(source, 0.0))
        self._sending[source] = end = self._handle(begin, self._work.message + copying)
        return _Begun(source, to, heavy, max(t, end - copying), (), (), False)

    def advance(self, transit: Transit) -> None:
        now = transit.time
        if not isinstance(transit, _Begun):
            self._inner.advance(transit)
            self._received(transit, now)
            return
        if transit.carried is None:
            carried = self._inner.depart(transit.source, transit.to, transit.nbytes, transit.time)
        else:
            carried = transit.carried
            self._inner.advance(carried)
        transit.carried = carried
        transit.time, transit.done = carried.time, carried.done
        self._received(transit, now)

    def narrow(self, node: Address, others: Iterable[Address], factor: float) -> None:
        self._inner.narrow(node, others, factor)

    def _received(self, transit: Transit, now: float) -> Transit:
        """Add the receiver's handling time, after all messages that arrived before."""
        work, to = self._work, transit.to
        if not transit.done or transit.source == to or not (work.message or work.receive or work.serve or work.copy):
            return transit
        payload = transit.nbytes - HEADER_BYTES
        if copying := work.copy * payload:
            transit.time += self._handle(now, copying) - (now + copying)
        seconds = work.message + (work.serve if to < 0 else work.receive) * payload
        begin = max(transit.time, self._receiving.get(to, 0.0))
        self._receiving[to] = transit.time = self._handle(begin, seconds)
        return transit
