"""How long messages take in virtual time.

A message passes hops, one after the other. A hop serves messages in the order in which they reach it, each for its
bytes over the hop's bandwidth. Forwarding is cut-through: a hop passes bytes on as they come, so an uncontended message
takes the latency of its path plus its bytes over the smallest bandwidth on it. Buffers are unbounded, links are full
duplex, and a node's messages to itself take no time.

A message that a slower hop let through only slowly does not keep a faster one from serving others meanwhile: the faster
hop spends its share of time and no more. On the first, the last and the slowest hops of a path that share is one
uninterrupted transmission at full bandwidth; on a faster one between them it is booked when the first byte arrives.

A driver goes hop by hop, so that every hop is taken in order of arrival:

    transit = fabric.depart(source, to, nbytes, now)
    ...schedule it at transit.tail for delivery if transit.done, otherwise at transit.head...
    ...and at that time call fabric.advance(transit), and schedule again by the same rule.

Messages from one node to another arrive in the order in which they departed, as long as events of equal time happen in
the order in which they were scheduled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from flockstep.errors import ConfigurationError
from flockstep.expression import Component
from flockstep.messages import Address, node_name, server
from flockstep.nodes import Cluster
from flockstep.simulation import units

USUAL = "1gbit"
"""The network of a simulation that names none."""


class Hop:
    """A shared resource of the network.

    `bandwidth` in bytes per second, of `full` when nothing is wrong; `free`: when all that was accepted is
    served; `passed`: when the last message that came through began to leave.
    """

    __slots__ = ("bandwidth", "free", "full", "name", "passed")

    def __init__(self, name: str, bandwidth: float) -> None:
        self.name = name
        self.bandwidth = self.full = bandwidth
        self.free = 0.0
        self.passed = 0.0

    def __repr__(self) -> str:
        return f"Hop({self.name!r}, {self.bandwidth:g} B/s, free at {self.free:g})"


Gaps = tuple[tuple[float, float], ...]
"""For each hop but the last: latency to the next, and the pace (bytes per second) at which messages cross over."""

Route = tuple[tuple[Hop, ...], Gaps]
Routing = Callable[[Address, Address], Route]

_HERE: Route = ((), ())


def gaps(bandwidths: Sequence[float], latencies: Sequence[float]) -> Gaps:
    """The gaps of a path of hops with these bandwidths.

    Bytes leave at the smallest bandwidth so far. If all that follows is faster, the next hop may as well wait until it
    can send the message in one go without delaying it: then they cross at the smallest bandwidth to come.
    """
    return tuple(
        (latency, max(min(bandwidths[: index + 1]), min(bandwidths[index + 1 :])))
        for index, latency in enumerate(latencies)
    )


class Transit:
    """A message of `nbytes` on its way.

    `hop` counts the hops reserved so far. While not `done`, `head` is when to reserve the next one; once `done`, `tail`
    is the time of delivery.
    """

    __slots__ = ("done", "gaps", "head", "hop", "hops", "nbytes", "source", "tail", "to")

    def __init__(self, source: Address, to: Address, nbytes: int, t: float, route: Route) -> None:
        self.source = source
        self.to = to
        self.nbytes = nbytes
        self.head = self.tail = t
        self.hop = 0
        self.hops, self.gaps = route
        self.done = not self.hops


class Fabric:
    """The network of one run: which hops each pair of nodes uses, and when those are free."""

    def __init__(self, route: Routing) -> None:
        self._route = route

    def depart(self, source: Address, to: Address, nbytes: int, t: float) -> Transit:
        """Send a message at time `t`: reserve its first hop. Call it in order of time."""
        transit = Transit(source, to, nbytes, t, self._route(source, to))
        if not transit.done:
            self.advance(transit)
        return transit

    def narrow(self, node: Address, others: Iterable[Address], factor: float) -> None:
        """From now on the node's own link has a `factor`-th of its full bandwidth.

        Raises:
            ConfigurationError: the node has no link that could be narrow.
        """
        ways = [self._route(*pair)[0] for other in others if other != node for pair in ((node, other), (other, node))]
        if not any(ways):
            raise ConfigurationError(
                f"the link of {node_name(node)} cannot be narrow: its messages pass none; take link('1gbit', '50us')"
            )
        for index, hops in enumerate(ways):
            own = hops[0] if index % 2 == 0 else hops[-1]
            own.bandwidth = own.full / factor

    def advance(self, transit: Transit) -> bool:
        """Reserve the next hop, at time `transit.head`; return whether it was the last."""
        index, hops, head, nbytes = transit.hop, transit.hops, transit.head, transit.nbytes
        hop = hops[index]
        hop.free = finish = max(head, hop.free) + nbytes / hop.bandwidth
        transit.hop = index = index + 1
        if index == len(hops):
            transit.tail = finish
            transit.done = True
            return True
        latency, pace = transit.gaps[index - 1]
        leaves = finish - nbytes / pace
        if leaves < head:  # bytes come more slowly than this hop could send: they leave as they come
            leaves = head
        if leaves < hop.passed:  # no message may pass the one before
            leaves = hop.passed
        hop.passed = leaves
        transit.head = leaves + latency
        return False


class Network(Component):
    """What joins the nodes."""

    noun: ClassVar[str] = "network"

    @abstractmethod
    def start(self, cluster: Cluster) -> Fabric:
        """The network of a run, with every hop free."""


@dataclass(frozen=True)
class Ideal(Network):
    """Every message arrives in the moment in which it is sent."""

    def start(self, cluster: Cluster) -> Fabric:
        """A network without hops."""
        return Fabric(lambda source, to: _HERE)


def cards(cluster: Cluster, bandwidth: float) -> tuple[dict[Address, Hop], dict[Address, Hop]]:
    """Egress and ingress of every node."""
    return (
        {address: Hop(f"egress of {node_name(address)}", bandwidth) for address in cluster.addresses},
        {address: Hop(f"ingress of {node_name(address)}", bandwidth) for address in cluster.addresses},
    )


@dataclass(frozen=True)
class Link(Network):
    """Every node has a network card of `bandwidth` in each direction; the core between them never blocks.

    `bandwidth` is text such as "1gbit" or a number of bytes per second, `latency` text such as "50us" or seconds.
    """

    bandwidth: str | float
    latency: str | float = 0.0

    def __post_init__(self) -> None:
        units.bandwidth(self.bandwidth)
        units.duration(self.latency, "latency")

    def start(self, cluster: Cluster) -> Fabric:
        """Two hops between any two nodes: the sender's egress, the receiver's ingress."""
        bandwidth = units.bandwidth(self.bandwidth)
        egress, ingress = cards(cluster, bandwidth)
        between = gaps([bandwidth] * 2, [units.duration(self.latency)])

        def route(source: Address, to: Address) -> Route:
            return ((egress[source], ingress[to]), between) if source != to else _HERE

        return Fabric(route)


@dataclass(frozen=True)
class Switch(Network):
    """Like `Link`, but all messages also share one backbone, halfway: `latency` is still that of the whole path."""

    bandwidth: str | float
    latency: str | float
    backbone: str | float

    def __post_init__(self) -> None:
        units.bandwidth(self.bandwidth)
        units.duration(self.latency, "latency")
        units.bandwidth(self.backbone, "backbone")

    def start(self, cluster: Cluster) -> Fabric:
        """Three hops between any two nodes: egress, backbone, ingress."""
        bandwidth = units.bandwidth(self.bandwidth)
        egress, ingress = cards(cluster, bandwidth)
        backbone = Hop("backbone", units.bandwidth(self.backbone))
        between = gaps([bandwidth, backbone.bandwidth, bandwidth], [units.duration(self.latency) / 2] * 2)

        def route(source: Address, to: Address) -> Route:
            return ((egress[source], backbone, ingress[to]), between) if source != to else _HERE

        return Fabric(route)


@dataclass(frozen=True)
class TwoTier(Network):
    """Groups of `group` consecutive workers, the last of which may be smaller; server i is in group i mod groups.

    Every node has a card of `inner_bandwidth`. A message inside its group takes `inner_latency`; one to another group
    also passes the uplink of the sender's group and the downlink of the receiver's, of `outer_bandwidth` each, and
    takes `outer_latency` on top.
    """

    group: int
    inner_bandwidth: str | float
    inner_latency: str | float
    outer_bandwidth: str | float
    outer_latency: str | float

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ConfigurationError(
                f"group must be >= 1 worker, got {self.group}; use link for a network without groups"
            )
        units.bandwidth(self.inner_bandwidth, "inner_bandwidth")
        units.duration(self.inner_latency, "inner_latency")
        units.bandwidth(self.outer_bandwidth, "outer_bandwidth")
        units.duration(self.outer_latency, "outer_latency")

    def groups(self, cluster: Cluster) -> dict[Address, int]:
        """Node → number of its group."""
        number = max(1, -(-cluster.workers // self.group))
        members = {rank: rank // self.group for rank in range(cluster.workers)}
        return members | {server(index): index % number for index in range(cluster.servers)}

    def start(self, cluster: Cluster) -> Fabric:
        """Two hops inside a group, four between groups: egress, uplink, downlink, ingress."""
        group = self.groups(cluster)
        inner, outer = units.bandwidth(self.inner_bandwidth), units.bandwidth(self.outer_bandwidth)
        egress, ingress = cards(cluster, inner)
        uplinks = [Hop(f"uplink of group {g}", outer) for g in range(max(group.values()) + 1)]
        downlinks = [Hop(f"downlink of group {g}", outer) for g in range(max(group.values()) + 1)]
        latency = units.duration(self.inner_latency)
        inside = gaps([inner] * 2, [latency])
        between = gaps([inner, outer, outer, inner], [latency / 2, units.duration(self.outer_latency), latency / 2])

        def route(source: Address, to: Address) -> Route:
            if source == to:
                return _HERE
            here, there = group[source], group[to]
            if here == there:
                return (egress[source], ingress[to]), inside
            return (egress[source], uplinks[here], downlinks[there], ingress[to]), between

        return Fabric(route)
