"""A network of machines in tiers, for clusters of machines that differ."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise
from typing import TypeVar

from flockstep.errors import ConfigurationError
from flockstep.messages import Address
from flockstep.nodes import Cluster, Hosts
from flockstep.simulation import units
from flockstep.simulation.fair import FairLink, Shared
from flockstep.simulation.network import Fabric, Hop, Link, Network, Route, gaps


@dataclass(frozen=True)
class Tiers(Network):
    """Machines in tiers: machine m has `machines`[m] consecutive workers and belongs to tier `tiers`[m].

    A message inside a machine passes the machine's link `inside`, on which every worker has its own card. A message to
    another machine of the tier also passes the cards of both machines, which have the tier's link `among`. A message to
    another tier also passes the link `between` the two tiers, whose latency is added. `between` holds the pairs of
    tiers in order: (0, 1), (0, 2), (1, 2). If a tuple has only one link, all use this link. Servers are on the machines
    of the workers, as in a real run over several hosts: on that of the worker beside which the strategy places the
    server, otherwise server i on machine i mod m. For collectives, machines are hosts. With one tier, `among` may be a
    `fair_link`: all messages that leave a machine at the same time share its card, and do not pass `inside`.
    """

    machines: tuple[int, ...]
    tiers: tuple[int, ...]
    inside: tuple[Link, ...]
    among: tuple[Network, ...]
    between: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.machines or min(self.machines) < 1:
            raise ConfigurationError(
                f"each of the machines must hold >= 1 worker, got {self.machines}; write (2, 2) for two machines with "
                "two workers each"
            )
        if len(self.tiers) != len(self.machines) or set(self.tiers) != set(range(self._count)):
            raise ConfigurationError(
                f"tiers must hold a tier number, counted from 0, for each of the {len(self.machines)} machines, got "
                f"{self.tiers}; write (0, 0, 1) for two machines in the first tier and one in the second"
            )
        pairs = self._count * (self._count - 1) // 2
        for name, wanted in (("inside", len(self.machines)), ("among", self._count), ("between", pairs)):
            got = len(getattr(self, name))
            if got not in (1, wanted) and wanted:
                raise ConfigurationError(
                    f"{name} must hold 1 or {wanted} links, got {got}; give 1 link to use it everywhere"
                )
        if any(isinstance(one, FairLink) for one in self.cards) and self._count > 1:
            raise ConfigurationError(
                f"`among` may contain a fair_link only if there is one tier, got {self._count} tiers; use link(…) "
                "instead"
            )

    @property
    def cards(self) -> tuple[Link | FairLink, ...]:
        """Return the links of `among`, whose bandwidths are those of the machines' network cards.

        Raises:
            ConfigurationError: `among` contains a network that is not a link.
        """
        found = tuple(one for one in self.among if isinstance(one, Link | FairLink))
        if len(found) < len(self.among):
            raise ConfigurationError(
                f"among must hold links, got {self.among}; write for example link('1gbit', '50us')"
            )
        return found

    @property
    def _count(self) -> int:
        return max(self.tiers, default=0) + 1

    def start(self, cluster: Cluster) -> Fabric:
        """Return the cards of workers on machines with several workers, the cards of machines, and both ends of the
        links between tiers.

        Raises:
            ConfigurationError: there are more workers than the machines hold.
        """
        if cluster.workers > sum(self.machines):
            raise ConfigurationError(
                f"the machines of tiers(…) must hold all {cluster.workers} workers, got room for "
                f"{sum(self.machines)}; add machines"
            )
        floor = _Floor(self, cluster)
        known: dict[tuple[Address, Address], Route] = {}

        def route(source: Address, to: Address) -> Route:
            found = known.get((source, to))
            if found is None:
                found = known[source, to] = floor.route(source, to)
            return found

        (first, *_) = self.cards
        return Shared(route, first.spread, first.backlog) if isinstance(first, FairLink) else Fabric(route)

    def hosts(self, workers: int) -> Hosts:
        """Return the workers of each machine; the last machines may have fewer workers than they can hold, or none."""
        ends = [min(end, workers) for end in accumulate(self.machines, initial=0)]
        return tuple(tuple(range(*pair)) for pair in pairwise(ends) if pair[0] < pair[1])


class _Floor:
    """The machines, tiers and hops of one run."""

    def __init__(self, shape: Tiers, cluster: Cluster):
        machines = [m for m, size in enumerate(shape.machines) for _ in range(size)]
        self._machine: dict[Address, int] = dict(enumerate(machines[: cluster.workers]))
        self._tier, self._inside = shape.tiers, _filled(shape.inside, len(shape.machines))
        self._shared = [size > 1 for size in shape.machines]
        places = [self._machine[rank] for rank in cluster.beside] or sorted(set(self._machine.values()))
        for address in (one for one in cluster.processes if one < 0):
            self._machine[address] = places[cluster.turn(address) % len(places)]
        self._among = _filled(shape.cards, max(shape.tiers) + 1)
        self._fair = isinstance(self._among[0], FairLink)
        pairs = list(combinations(range(max(shape.tiers) + 1), 2))
        self._between = dict(zip(pairs, _filled(shape.between, len(pairs)), strict=True))
        self._hops: dict[str, Hop] = {}

    def route(self, source: Address, to: Address) -> Route:
        """The hops from one node to another, and the latencies between them."""
        if source == to:
            return (), ()
        here, there = self._machine[source], self._machine[to]
        hops: list[Hop] = []
        latencies: list[float] = []
        inner = [self._inside[here], self._inside[there]]
        if here == there:
            hops = [self._hop(f"egress of {source}", inner[0]), self._hop(f"ingress of {to}", inner[0])]
            latencies = [units.duration(inner[0].latency)]
        else:
            tiers = self._tier[here], self._tier[there]
            up = self._hop(f"egress of machine {here}", self._among[tiers[0]])
            down = self._hop(f"ingress of machine {there}", self._among[tiers[1]])
            halves = [units.duration(self._among[tier].latency) / 2 for tier in tiers]
            if tiers[0] == tiers[1]:
                hops, latencies = [up, down], [sum(halves)]
            else:
                link = self._between[min(tiers), max(tiers)]
                way = f"from tier {tiers[0]} to {tiers[1]}"
                hops = [up, self._hop(f"out {way}", link), self._hop(f"in {way}", link), down]
                latencies = [halves[0], units.duration(link.latency), halves[1]]
            if self._shared[here] and not self._fair:
                hops.insert(0, self._hop(f"egress of {source}", inner[0]))
                latencies.insert(0, units.duration(inner[0].latency) / 2)
            if self._shared[there] and not self._fair:
                hops.append(self._hop(f"ingress of {to}", inner[1]))
                latencies.append(units.duration(inner[1].latency) / 2)
        return tuple(hops), gaps([hop.bandwidth for hop in hops], latencies)

    def _hop(self, name: str, link: Link | FairLink) -> Hop:
        if name not in self._hops:
            self._hops[name] = Hop(name, units.bandwidth(link.bandwidth))
        return self._hops[name]


L = TypeVar("L")


def _filled(links: tuple[L, ...], count: int) -> tuple[L, ...]:
    return links * count if len(links) == 1 else links
