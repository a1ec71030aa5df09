"""The machines of a cluster: their number, speed, links and failures.

A description is read from a TOML file (`flockstep.costs.cluster_file`): a custom file, a file measured by `flockstep
calibrate`, or a built-in file. Quantities have plain units: bytes, seconds, per second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

from flockstep.errors import ConfigurationError
from flockstep.simulation.compute import ComputeModel, ConstantTime, SharedCores, Speeds
from flockstep.simulation.fair import FairLink
from flockstep.simulation.law import mean_of
from flockstep.simulation.network import Link, Network
from flockstep.simulation.tiers import Tiers

Reach = Literal["node", "inside", "between"]
DAY = 86400.0
"""Number of seconds in a day."""
MOST = 1_000_000
"""Largest number of machines, or of workers, in a cluster."""
SLOWEST, FASTEST = 1e-9, 1e9
"""Smallest (SLOWEST) and largest (FASTEST) allowed speed of a machine, relative to the speed for which the
description's `compute` holds.
"""

KeyPath = tuple[str | int, ...]
"""Keys and indices that lead to a value of a description, such as ("links", 0, "between")."""


class WrongValue(ConfigurationError):
    """Error: a cluster's description has an invalid value. `path` locates the value, so that a reader of the
    description can name its key.
    """

    def __init__(self, message: str, *path: str | int):
        super().__init__(message)
        self.path: KeyPath = path


def need(holds: bool, message: str, *path: str | int) -> None:
    """Raise `WrongValue` with `message` for the value at `path` unless the rule holds."""
    if not holds:
        raise WrongValue(message, *path)


@dataclass(frozen=True)
class MachineGroup:
    """A group of identical machines in a cluster."""

    name: str
    count: int = 1
    """Number of machines in the group."""
    workers: int = 1
    """Number of worker processes on each machine."""
    speed: float = 1.0
    """Speed of each machine relative to the speed for which the description's `compute` holds; 2 is twice as fast."""
    cores: int | None = None
    """Number of cores of each machine that the machine's workers share; None for one core per worker."""
    memory: float | None = None
    """Memory of each machine in bytes; None if unknown."""
    failures: float = 0.0
    """Number of failures of one machine per second."""
    restart: float = 0.0
    """Seconds from a failure until the machine rejoins."""
    comes_and_goes: bool = False
    """Whether the group's workers may join and leave at any time, like volunteers' machines or spot instances."""

    def __post_init__(self) -> None:
        for key in ("count", "workers", "cores"):
            if (value := getattr(self, key)) is not None:
                need(value >= 1, f"{key} must be >= 1, got {shown(value)}; leave it out for the default", key)
                rule = f"{key} must be <= {MOST}, got {shown(value)}; describe only a part of the cluster"
                need(value <= MOST, rule, key)
        rule = f"count × workers must be <= {MOST}, got {self.size}; describe only a part of the cluster"
        need(self.size <= MOST, rule, "count")
        for key in ("speed", "memory"):
            if (value := getattr(self, key)) is not None:
                rule = f"{key} must be > 0 and finite, got {value:g}; leave it out for the default"
                need(0 < value < math.inf, rule, key)
        rule = (
            f"speed must be >= {SLOWEST:g} and <= {FASTEST:g}, got {self.speed:g}; 1 is the speed for which compute "
            "holds"
        )
        need(SLOWEST <= self.speed <= FASTEST, rule, "speed")
        for key in ("failures", "restart"):
            value = getattr(self, key)
            need(0 <= value < math.inf, f"{key} must be >= 0 and finite, got {value:g}; leave it out for 0", key)

    @property
    def size(self) -> int:
        """Number of workers on all machines of the group."""
        return self.count * self.workers


@dataclass(frozen=True)
class ClusterLink:
    """A link within each machine of some groups (`node`), among all machines of some groups (`inside`), or between two
    tiers (`between`).
    """

    reach: Reach
    groups: tuple[str, ...]
    bandwidth: float
    """Bandwidth of a network card in each direction, in bytes per second."""
    latency: float = 0.0
    """Seconds that a message within a machine or tier takes in addition to the time for its bytes.

    Between tiers, the seconds are added to the latencies within both tiers.
    """
    fair: bool = False
    """Whether messages that pass the link at the same time share its bandwidth, as over TCP, instead of waiting in
    turn.
    """

    def __post_init__(self) -> None:
        width, names = self.bandwidth, listed(self.groups)
        rule = f"bandwidth must be > 0 and finite, got {width:g} bytes per second; write '1gbit'"
        need(0 < width < math.inf, rule, "bandwidth")
        rule = f"latency must be >= 0 and finite, got {self.latency:g} s; write '50us'"
        need(0 <= self.latency < math.inf, rule, "latency")
        rule = f"{self.reach} must name each group only once, got {names}; remove the duplicate"
        need(len(set(self.groups)) == len(self.groups), rule, self.reach)
        rule = f"between must name two groups, got {names}; write one link for every pair of groups"
        need(self.reach != "between" or len(self.groups) == 2, rule, "between")
        rule = f"{self.reach} must name at least one group, got none; leave the link out"
        need(bool(self.groups), rule, self.reach)

    @property
    def network(self) -> Link:
        """Return the link as a link of the network model for virtual time, on which messages pass one after the
        other.
        """
        return Link(self.bandwidth, self.latency)

    @property
    def alone(self) -> Link | FairLink:
        """Return the network model for virtual time of a cluster in which this link is the only kind of link between
        machines.
        """
        return FairLink(self.bandwidth, self.latency) if self.fair else self.network


@dataclass(frozen=True)
class Rates:
    """Throughput of one worker's codecs and optimizers, in elements per second, by expression of the codec or
    optimizer.
    """

    encode: Mapping[str, float] = field(default_factory=dict)
    decode: Mapping[str, float] = field(default_factory=dict)
    """Elements decoded per second, including their addition to another array."""
    optimizer: Mapping[str, float] = field(default_factory=dict)


def shown(value: object) -> str:
    """Return a value as text for an error message, shortened to 200 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of very many digits; too many brackets
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Return the names as one text, separated by commas; "none" if there are no names."""
    return ", ".join(names) or "none"


@dataclass(frozen=True)
class ClusterShape:
    """The description of a cluster: groups of machines in order of rank, and the links between the workers.

    The groups that an `inside` link names form a tier; a separate link connects every two tiers.
    """

    name: str
    groups: tuple[MachineGroup, ...]
    wires: tuple[ClusterLink, ...] = ()
    law: ComputeModel = field(default_factory=lambda: ConstantTime(0.01))
    """Distribution of the seconds that a gradient takes on a machine of speed 1."""
    operations: float | None = None
    """Floating-point operations per second of one worker on a machine of speed 1; None if unknown."""
    overhead: float = 0.0
    """Seconds that a gradient takes in addition to its operations, whatever the size of the model."""
    about: str = ""
    job: str | None = None
    """The job whose gradients the distribution `law` describes; None if `law` describes no particular job."""
    rates: Rates = field(default_factory=Rates)
    message: float = 0.0
    """Seconds that a worker spends on each message that it sends or receives, whatever the size of the message."""
    copy: float = 0.0
    """Seconds that a core spends on each byte of payload at either end of a link, while the link carries the byte."""
    step: float = 0.0
    """Seconds of a worker's step that are not spent on the gradient, the optimizer, messages or codecs."""
    servers_apart: bool = False
    """Whether each server has a network card of its own, as in runs with `--network`, instead of that of a worker's
    machine, as in runs over several hosts.
    """

    def __post_init__(self) -> None:
        need(bool(self.groups), "a cluster needs at least one group of nodes, got none; add [nodes.machines]", "nodes")
        if self.operations is not None:
            rule = f"operations must be > 0 per second, got {self.operations:g}; leave it out if unknown"
            need(0 < self.operations < math.inf, rule, "operations")
        for key in ("overhead", "message", "copy", "step"):
            rule = f"{key} must be >= 0 seconds, got {getattr(self, key):g}; leave it out for no delay"
            need(0 <= getattr(self, key) < math.inf, rule, key)
        rule = (
            f"compute must describe a worker that has its own core, got {self.law}; set cores = {self.law.sharing} in "
            "[nodes.…] instead"
        )
        need(self.law.sharing is None, rule, "compute")
        _check_links(self)
        apart = not self.servers_apart or (len(self.tiers) == 1 and all(group.workers == 1 for group in self.groups))
        rule = "servers_apart must be false if links differ or a machine has several workers, got true; leave it out"
        need(apart, rule, "servers_apart")
        for place, wire in enumerate(self.wires):
            others = {other.reach for other in self.wires if other is not wire}
            rule = (
                "fair must be false if there is more than one kind of link besides node, got true in a cluster with "
                f"{len(self.wires)} links; leave it out, or describe one kind of link between machines"
            )
            only = not others or (wire.reach == "inside" and others == {"node"})
            need(only or not wire.fair, rule, "links", place, "fair")

    @property
    def workers(self) -> int:
        """Number of workers on all machines of the cluster."""
        return sum(group.size for group in self.groups)

    @property
    def nodes(self) -> int:
        """Number of machines in the cluster."""
        return sum(group.count for group in self.groups)

    @property
    def tiers(self) -> tuple[tuple[str, ...], ...]:
        """Names of the machine groups in each tier, in order of the groups. A tier consists of the groups that one
        `inside` link connects.
        """
        together = {name: wire.groups for wire in self.wires if wire.reach == "inside" for name in wire.groups}
        names = [group.name for group in self.groups]
        tiers = [tuple(one for one in names if one in together.get(name, (name,))) for name in names]
        return tuple(dict.fromkeys(tiers))

    @property
    def comes_and_goes(self) -> bool:
        """Whether the cluster has a group whose workers may join and leave at any time."""
        return any(group.comes_and_goes for group in self.groups)

    @property
    def failures(self) -> float:
        """Number of failures per second of all machines together."""
        return sum(group.failures * group.count for group in self.groups)

    @property
    def memory(self) -> float | None:
        """Smallest memory per worker in bytes; None if unknown."""
        known = [group.memory / group.workers for group in self.groups if group.memory is not None]
        return min(known, default=None)

    def with_memory(self, nbytes: float | None) -> ClusterShape:
        """Return the cluster with `nbytes` bytes of memory for each worker; None for unknown memory."""
        groups = (replace(one, memory=None if nbytes is None else nbytes * one.workers) for one in self.groups)
        return replace(self, groups=tuple(groups))

    def placed(self, workers: int | None = None) -> tuple[tuple[MachineGroup, int], ...]:
        """Return the machines in order of rank, with the number of workers on each machine.

        A number of `workers` that differs from that of the description is divided among the machines in proportion.

        Raises:
            ConfigurationError: `workers` is below 1.
        """
        if workers is not None and workers < 1:
            raise ConfigurationError(f"workers must be >= 1, got {workers}; use 1 for plain training")
        sizes = [group.size for group in self.groups]
        if workers is not None and workers != sum(sizes):
            # Whole numbers that differ from the exact shares by less than one.
            exact = [size * workers / sum(sizes) for size in sizes]
            sizes = [math.floor(one) for one in exact]
            rest = sorted(range(len(sizes)), key=lambda i: (sizes[i] - exact[i], i))
            for i in rest[: workers - sum(sizes)]:
                sizes[i] += 1
        machines: list[tuple[MachineGroup, int]] = []
        for group, size in zip(self.groups, sizes, strict=True):
            room = group.workers
            if size > room and group.count == 1 and self._of("inside", group.name) is None:
                # No link connects the only machine to similar ones, so that it holds all workers.
                if self._of("node", group.name) is None:
                    raise ConfigurationError(
                        f"{group.name} is one machine with one worker, and no link connects a group of {size}; add "
                        f'[[links]] node = "{group.name}" or inside = "{group.name}"'
                    )
                room = size
            machines += [(group, min(room, size - first)) for first in range(0, size, room)]
        return tuple(machines)

    def compute(self, seconds: float | None = None, workers: int | None = None) -> ComputeModel:
        """Return the compute model of `workers` workers of the cluster, for a run in virtual time.

        `seconds` is the mean duration of a gradient at speed 1; None stands for the mean of `law`.

        If only some machines have fewer cores than workers, those workers are slowed in proportion instead of sharing
        cores.
        """
        scale = 1.0
        if seconds is not None:
            if not 0 <= seconds < math.inf:
                raise ConfigurationError(
                    f"seconds per gradient must be >= 0 and finite, got {seconds:g}; use 0.01 for 10 ms"
                )
            mean = mean_of(self.law)
            if mean == 0 and seconds > 0:
                raise ConfigurationError(
                    f"{self.law} takes no time and cannot be scaled to {seconds:g} s; use a compute model with a mean "
                    "> 0"
                )
            scale = seconds / mean if mean else 1.0
        placed = [
            (group, size, size if group.cores is None else min(group.cores, size))
            for group, size in self.placed(workers)
        ]
        crowded = all(cores < size for _, size, cores in placed)
        factors = tuple(
            scale * (1.0 if crowded else size / cores) / group.speed
            for group, size, cores in placed
            for _ in range(size)
        )
        if scale == 0:
            return ConstantTime(0.0)
        if len(set(factors)) == 1:
            factors = factors[:1]
        law = self.law if factors == (1.0,) else Speeds(self.law, factors)
        return SharedCores(law, sum(cores for _, _, cores in placed), turns=True) if crowded else law

    def network(self, workers: int | None = None) -> Network:
        """Return the simplest network model that describes the links between the workers, for a run in virtual time.

        If there are several machines, servers are on the machines of the workers and use their network cards, unless
        `servers_apart` is set.
        """
        machines, tiers = self.placed(workers), self.tiers
        places = [next(i for i, tier in enumerate(tiers) if group.name in tier) for group, _ in machines]
        inside = [self._of("node", group.name) for group, _ in machines]
        among = [self._of("inside", tier[0]) for tier in tiers]
        if len(machines) == 1:
            wire = inside[0] or among[0] or next(iter(self.wires), None)
            return Link(math.inf) if wire is None else wire.alone
        if self.servers_apart and (outer := among[places[0]]) is not None:
            return outer.alone
        used = sorted(set(places))
        between = {pair: self._joining(tiers[pair[0]], tiers[pair[1]]) for pair in combinations(used, 2)}
        cards: list[Link | FairLink] = []
        for tier in used:
            # A tier without a link is a single machine, whose card never limits a message.
            fastest = max((one.bandwidth for pair, one in between.items() if tier in pair), default=math.inf)
            cards.append(Link(fastest) if (wire := among[tier]) is None else wire.alone)
        links = tuple(Link(math.inf) if wire is None else wire.network for wire in inside)
        return Tiers(
            machines=tuple(size for _, size in machines),
            tiers=tuple(used.index(place) for place in places),
            inside=links[:1] if len(set(links)) == 1 else links,
            among=tuple(cards),
            between=tuple(wire.network for wire in between.values()),
        )

    def wire_between(self, one: int, other: int, workers: int | None = None) -> ClusterLink:
        """Return the slowest link on the path between two workers, with the latency of the whole path.

        Raises:
            ConfigurationError: both ranks are the same.
        """
        if one == other:
            raise ConfigurationError(f"a link needs two different workers, got worker {one} twice; name two workers")
        placed = enumerate(self.placed(workers))
        machines = [(number, group.name) for number, (group, size) in placed for _ in range(size)]
        here, there = machines[one][1], machines[other][1]
        if machines[one] == machines[other]:
            wire = self._of("node", here)
            assert wire is not None
            return wire
        tiers = [next(tier for tier in self.tiers if name in tier) for name in (here, there)]
        if tiers[0] == tiers[1]:
            path = [self._of("inside", here)]
        else:
            path = [self._joining(*tiers)]
            halves = [self._of("inside", name) for name in (here, there)]
            path += [ClusterLink("inside", w.groups, w.bandwidth, w.latency / 2) for w in halves if w is not None]
        known = [wire for wire in path if wire is not None]
        slowest = min(known, key=lambda wire: wire.bandwidth)
        return ClusterLink(slowest.reach, slowest.groups, slowest.bandwidth, sum(wire.latency for wire in known))

    @functools.cached_property
    def slowest(self) -> ClusterLink:
        """Return the slowest link between any two workers, with the latency of the whole path.

        Raises:
            ConfigurationError: there is only one worker.
        """
        # Among these workers every kind of pair occurs: two of a group's first machine, and one of its second.
        found, first = list[int](), 0
        for group in self.groups:
            wanted = {0, min(1, group.workers - 1), group.workers if group.count > 1 else 0}
            found += [first + one for one in sorted(wanted)]
            first += group.size
        if len(found) < 2:
            raise ConfigurationError(f"{self.name} has only one worker and therefore no slowest link; add a node")
        wires = [self.wire_between(*pair) for pair in combinations(found, 2)]
        return max(wires, key=lambda wire: (1 / wire.bandwidth, wire.latency))

    def _of(self, reach: Reach, group: str) -> ClusterLink | None:
        return next((wire for wire in self.wires if wire.reach == reach and group in wire.groups), None)

    def _joining(self, here: tuple[str, ...], there: tuple[str, ...]) -> ClusterLink:
        for wire in self.wires:
            if wire.reach == "between":
                a, b = wire.groups
                if (a in here and b in there) or (a in there and b in here):
                    return wire
        raise WrongValue(
            f'{here[0]} and {there[0]} must be connected by a link, got none; add [[links]] between = ["{here[0]}", '
            f'"{there[0]}"]',
            "links",
        )


def _check_links(cluster: ClusterShape) -> None:
    """Check that groups have different names, that links name existing groups, each kind of link once, and that every
    two workers are connected.
    """
    names = [group.name for group in cluster.groups]
    rule = f"groups of nodes must have different names, got {listed(names)}; rename a group"
    need(len(set(names)) == len(names), rule, "nodes")
    seen: set[tuple[str, ...]] = set()
    for number, wire in enumerate(cluster.wires):
        path = "links", number, wire.reach
        for name in wire.groups:
            rule = (
                f"{wire.reach} must name existing groups of nodes ({', '.join(names)}), got {name!r}; add "
                f"[nodes.{name}] or name an existing group"
            )
            need(name in names, rule, *path)
        keys: set[tuple[str, ...]] = {(wire.reach, name) for name in wire.groups}
        if wire.reach == "between":
            ends = {next(tier for tier in cluster.tiers if name in tier) for name in wire.groups}
            rule = (
                f"between must connect two tiers, got {listed(wire.groups)}, which an inside link connects already; "
                "leave out one of the links"
            )
            need(len(ends) == 2, rule, *path)
            keys = {(wire.reach, *sorted(map(str, ends)))}
        rule = (
            f"{listed(wire.groups)} must have at most one link of each kind, got a second {wire.reach} link; leave out "
            "one of them"
        )
        need(not keys & seen, rule, *path)
        seen |= keys
    for group in cluster.groups:
        kinds: tuple[tuple[Reach, int, str], ...] = (
            ("node", group.workers, "workers of a machine"),
            ("inside", group.count, "machines"),
        )
        for reach, many, what in kinds:
            rule = (
                f"the {many} {what} of {group.name} must be connected by a link, got none; add [[links]] {reach} = "
                f'"{group.name}"'
            )
            need(many == 1 or cluster._of(reach, group.name) is not None, rule, "nodes", group.name)
    for here, there in combinations(cluster.tiers, 2):
        cluster._joining(here, there)
