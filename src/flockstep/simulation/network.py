"""Network models: how long messages take in virtual time.

A message passes hops, one after another. A hop serves messages in the order of their arrival; a message takes its
number of bytes divided by the hop's bandwidth. Forwarding is cut-through: a hop passes bytes on as they arrive, so an
uncontended message takes the latency of its path plus its number of bytes divided by the smallest bandwidth on the
path. Buffers are unbounded, links are full duplex, and a node's messages to itself take no time.

A message that arrives slowly from a slower hop does not keep a faster hop from serving other messages: the faster hop
spends only the message's share of its time. On the first, the last and the slowest hops of a path that share is one
uninterrupted transmission at full bandwidth; on a faster hop between them it is reserved when the first byte arrives.

A driver proceeds hop by hop, so that every hop is reserved in the order of arrival:

    transit = fabric.depart(source, to, nbytes, now)
    ...at transit.time deliver the message if transit.done...
    ...otherwise call fabric.advance(transit) at that time, and go on by the same rule.

Messages between two nodes arrive in the order of their departure, if events of equal time happen in the order in which
they were scheduled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from flockstep.errors import ConfigurationError, require
from flockstep.expression import Component
from flockstep.messages import Address, node_name
from flockstep.nodes import Cluster, Hosts, one_host
from flockstep.simulation import units


class Hop:
    """A shared resource on the path of messages, such as one direction of a network card.

    `bandwidth` is in bytes per second, which a fault may reduce from `full`; `free` is the time at which all accepted
    messages have been served; `passed`, the time at which the last message began to leave.
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
"""(latency in seconds, bytes per second) between each hop of a path and the next hop."""

Route = tuple[tuple[Hop, ...], Gaps]
Routing = Callable[[Address, Address], Route]

_HERE: Route = ((), ())


def gaps(bandwidths: Sequence[float], latencies: Sequence[float]) -> Gaps:
    """Return latency and rate between the hops of a path, whose bandwidths are given.

    Bytes leave a hop at the smallest bandwidth so far. If all later hops are faster, the next hop can wait until it can
    send the message without interruption, without delaying the message: then bytes cross at the smallest bandwidth of
    the later hops.
    """
    return tuple(
        (latency, max(min(bandwidths[: index + 1]), min(bandwidths[index + 1 :])))
        for index, latency in enumerate(latencies)
    )


class Transit(msgspec.Struct, eq=False, gc=False):
    """A message of `nbytes` bytes on its way through the network."""

    source: Address
    to: Address
    nbytes: int
    time: float
    """Seconds of virtual time: the delivery of the message if `done`, otherwise the time at which to reserve the next
    hop.
    """
    hops: tuple[Hop, ...]
    gaps: Gaps
    done: bool
    hop: int = 0
    """Number of hops of the path that are reserved so far."""


class Fabric:
    """The network of one run: the path between each pair of nodes, and the time at which each hop becomes free."""

    def __init__(self, route: Routing) -> None:
        self._route = route

    def depart(self, source: Address, to: Address, nbytes: int, t: float) -> Transit:
        """Send a message at time `t` and reserve its first hop. Calls must be in order of time."""
        hops, gaps = self._route(source, to)
        transit = Transit(source, to, nbytes, t, hops, gaps, not hops)
        if hops:
            self.advance(transit)
        return transit

    def handle_with(self, handle: Callable[[float, float], float]) -> None:
        """Let the function `handle` determine when a node has handled a message, from the time at which handling begins
        and the seconds that it takes on a core. Networks whose nodes need no time for messages ignore the call.
        """

    def narrow(self, node: Address, others: Iterable[Address], factor: float) -> None:
        """Set the bandwidth of the node's own link to 1/`factor` of its full bandwidth from now on.

        Raises:
            ConfigurationError: the node has no link of its own.
        """
        ways = [self._route(*pair)[0] for other in others if other != node for pair in ((node, other), (other, node))]
        if not any(ways):
            raise ConfigurationError(
                f"the network has no link of {node_name(node)} whose bandwidth can be reduced; use a network with a "
                "link for each node, such as link('1gbit', '50us')"
            )
        for index, hops in enumerate(ways):
            own = hops[0] if index % 2 == 0 else hops[-1]
            own.bandwidth = own.full / factor

    def advance(self, transit: Transit) -> None:
        """Reserve the next hop of a message, at the time `transit.time`."""
        index, now, nbytes = transit.hop, transit.time, transit.nbytes
        hop, gaps = transit.hops[index], transit.gaps
        transit.hop = index + 1
        begins = hop.free
        if begins < now:
            begins = now
        hop.free = finish = begins + nbytes / hop.bandwidth
        if index == len(gaps):
            transit.time, transit.done = finish, True
            return
        latency, pace = gaps[index]
        leaves = finish - nbytes / pace
        if leaves < now:  # bytes arrive more slowly than this hop could send: they leave as they arrive
            leaves = now
        if leaves < hop.passed:  # no message may overtake the previous one
            leaves = hop.passed
        hop.passed = leaves
        transit.time = leaves + latency


class Network(Component):
    """A model of the network that connects the nodes of a run."""

    noun: ClassVar[str] = "network"

    @abstractmethod
    def start(self, cluster: Cluster) -> Fabric:
        """Create the network of one run, in which no hop is in use."""

    def hosts(self, workers: int) -> Hosts:
        """Return the workers of each host; all workers are on one host unless the network describes machines."""
        return one_host(workers)

    def resolved(self, workers: int) -> Network:
        """Return the network that a record names for this network and a number of workers: itself, unless its links are
        found elsewhere, so that the record holds every value.
        """
        return self


@dataclass(frozen=True)
class Ideal(Network):
    """Every message arrives at the time at which it is sent."""

    def start(self, cluster: Cluster) -> Fabric:
        return Fabric(lambda source, to: _HERE)


def cards(cluster: Cluster, bandwidth: float) -> tuple[dict[Address, Hop], dict[Address, Hop]]:
    """Return the egress hop and the ingress hop of every node's network card, by address."""
    return (
        {address: Hop(f"egress of {node_name(address)}", bandwidth) for address in cluster.processes},
        {address: Hop(f"ingress of {node_name(address)}", bandwidth) for address in cluster.processes},
    )


@dataclass(frozen=True)
class Link(Network):
    """Every node has a network card of `bandwidth` in each direction; the core between the cards never blocks.

    `bandwidth` is a text such as "1gbit", or a number of bytes per second; `latency` is a text such as "50us", or a
    number of seconds.
    """

    bandwidth: str | float
    latency: str | float = 0.0

    def __post_init__(self) -> None:
        units.bandwidth(self.bandwidth)
        units.duration(self.latency, "latency")

    def start(self, cluster: Cluster) -> Fabric:
        """Return the two hops between any two nodes: the sender's egress and the receiver's ingress."""
        bandwidth = units.bandwidth(self.bandwidth)
        egress, ingress = cards(cluster, bandwidth)
        between = gaps([bandwidth] * 2, [units.duration(self.latency)])

        def route(source: Address, to: Address) -> Route:
            return ((egress[source], ingress[to]), between) if source != to else _HERE

        return Fabric(route)


@dataclass(frozen=True)
class Switch(Network):
    """A network like `link`, except that all messages pass one common backbone; `latency` is the latency of the whole
    path.
    """

    bandwidth: str | float
    latency: str | float
    backbone: str | float

    def __post_init__(self) -> None:
        units.bandwidth(self.bandwidth)
        units.duration(self.latency, "latency")
        units.bandwidth(self.backbone, "backbone")

    def start(self, cluster: Cluster) -> Fabric:
        """Return the three hops between any two nodes: egress, backbone, ingress."""
        bandwidth = units.bandwidth(self.bandwidth)
        egress, ingress = cards(cluster, bandwidth)
        backbone = Hop("backbone", units.bandwidth(self.backbone))
        between = gaps([bandwidth, backbone.bandwidth, bandwidth], [units.duration(self.latency) / 2] * 2)

        def route(source: Address, to: Address) -> Route:
            return ((egress[source], backbone, ingress[to]), between) if source != to else _HERE

        return Fabric(route)


@dataclass(frozen=True)
class TwoTier(Network):
    """Groups of `group` consecutive workers; the last group may be smaller; server i is in group i mod groups.

    Every node has a card of `inner_bandwidth`. A message inside a group takes `inner_latency`. A message to another
    group also passes the uplink of the sender's group and the downlink of the receiver's group, of `outer_bandwidth`
    each, and takes `outer_latency` in addition.
    """

    group: int
    inner_bandwidth: str | float
    inner_latency: str | float
    outer_bandwidth: str | float
    outer_latency: str | float

    def __post_init__(self) -> None:
        require(self.group >= 1, "group", ">= 1 worker", self.group, "use link for a network without groups")
        units.bandwidth(self.inner_bandwidth, "inner_bandwidth")
        units.duration(self.inner_latency, "inner_latency")
        units.bandwidth(self.outer_bandwidth, "outer_bandwidth")
        units.duration(self.outer_latency, "outer_latency")

    def groups(self, cluster: Cluster) -> dict[Address, int]:
        """Return a mapping from the address of each node to the number of the node's group."""
        number = max(1, -(-cluster.workers // self.group))
        members = {rank: rank // self.group for rank in range(cluster.workers)}
        return members | {one: cluster.turn(one) % number for one in cluster.processes if one < 0}

    def start(self, cluster: Cluster) -> Fabric:
        """Return the hops: two inside a group, and four between groups (egress, uplink, downlink, ingress)."""
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
