"""The machines of a cluster: their number, speed, links and failures.

A description is read from a TOML file (`flockstep.costs.cluster_file`): a custom file, a file measured by `flockstep
calibrate`, or a built-in file. Quantities have plain units: bytes, seconds, per second.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from flockstep.collectives import costs
from flockstep.costs.machines import ClusterLink, MachineGroup, Rates, Reach, WrongValue, listed
from flockstep.errors import ConfigurationError
from flockstep.simulation.compute import ComputeModel, ConstantTime, SharedCores, Speeds
from flockstep.simulation.fair import FairLink
from flockstep.simulation.law import mean_of
from flockstep.simulation.network import Link, Network
from flockstep.simulation.tiers import Tiers


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
        if not self.groups:
            raise WrongValue("a cluster needs at least one group of nodes, got none; add [nodes.machines]", "nodes")
        if self.operations is not None and not 0 < self.operations < math.inf:
            raise WrongValue(
                f"operations must be > 0 per second, got {self.operations:g}; leave it out if unknown", "operations"
            )
        for key in ("overhead", "message", "copy", "step"):
            if not 0 <= (got := getattr(self, key)) < math.inf:
                raise WrongValue(f"{key} must be >= 0 seconds, got {got:g}; leave it out for no delay", key)
        if self.law.sharing is not None:
            raise WrongValue(
                f"compute must describe a worker that has its own core, got {self.law}; set cores = "
                f"{self.law.sharing} in [nodes.…] instead",
                "compute",
            )
        _check_names(self)
        _check_joined(self)
        if self.servers_apart and (len(self.tiers) > 1 or any(group.workers > 1 for group in self.groups)):
            raise WrongValue(
                "servers_apart must be false if links differ or a machine has several workers, got true; leave it out",
                "servers_apart",
            )
        for place, wire in enumerate(self.wires):
            others = {other.reach for other in self.wires if other is not wire}
            if wire.fair and others and (wire.reach != "inside" or others != {"node"}):
                raise WrongValue(
                    "fair must be false if there is more than one kind of link besides node, got true in a cluster "
                    f"with {len(self.wires)} links; leave it out, or describe one kind of link between machines",
                    "links",
                    place,
                    "fair",
                )

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
        sizes = _shares([group.size for group in self.groups], self.workers if workers is None else workers)
        return tuple(
            machine for group, size in zip(self.groups, sizes, strict=True) for machine in self._in(group, size)
        )

    def _in(self, group: MachineGroup, size: int) -> list[tuple[MachineGroup, int]]:
        """Place `size` workers on the machines of a group, or all on its only machine if no link connects it to similar
        ones.
        """
        room = group.workers
        if size > room and group.count == 1 and self._of("inside", group.name) is None:
            if self._of("node", group.name) is None:
                raise ConfigurationError(
                    f"{group.name} is one machine with one worker, and no link connects a group of {size}; add "
                    f'[[links]] node = "{group.name}" or inside = "{group.name}"'
                )
            room = size
        return [(group, min(room, size - first)) for first in range(0, size, room)]

    def groups_by_rank(self, workers: int | None = None) -> tuple[MachineGroup, ...]:
        """The machine group of every worker, in order of rank."""
        return tuple(group for group, size in self.placed(workers) for _ in range(size))

    def factors(self, workers: int | None = None) -> tuple[float, ...]:
        """Factor of every worker on the durations of the distribution `law`, if each worker has a core of its own."""
        return tuple(1 / group.speed for group in self.groups_by_rank(workers))

    def seconds_for(self, work: float) -> float:
        """Return the mean seconds of a gradient of `work` floating-point operations on a machine of speed 1.

        Raises:
            ConfigurationError: the description has no operations per second.
        """
        if self.operations is None:
            raise ConfigurationError(
                f"{self.name} does not say how many operations per second a worker performs; add operations = "
                "'10G/s', or measure the job on that cluster with flockstep calibrate"
            )
        return self.overhead + work / self.operations

    def compute(self, seconds: float | None = None, workers: int | None = None) -> ComputeModel:
        """Return the compute model of `workers` workers of the cluster, for a run in virtual time.

        `seconds` is the mean duration of a gradient at speed 1; None stands for the mean of `law`.

        If only some machines have fewer cores than workers, those workers are slowed in proportion instead of sharing
        cores.
        """
        machines = self.placed(workers)
        scale = 1.0 if seconds is None else _scale(self.law, seconds)
        crowded = [_cores(group, size) < size for group, size in machines]
        stretch = [1.0 if all(crowded) else size / _cores(group, size) for group, size in machines]
        factors = tuple(
            scale * times / group.speed
            for (group, size), times in zip(machines, stretch, strict=True)
            for _ in range(size)
        )
        if scale == 0:
            return ConstantTime(0.0)
        law = _times(self.law, factors)
        return SharedCores(law, sum(_cores(*machine) for machine in machines), turns=True) if all(crowded) else law

    def network(self, workers: int | None = None) -> Network:
        """Return the simplest network model that describes the links between the workers, for a run in virtual time.

        If there are several machines, servers are on the machines of the workers and use their network cards, unless
        `servers_apart` is set.
        """
        machines = self.placed(workers)
        tiers = self.tiers
        places = [next(i for i, tier in enumerate(tiers) if group.name in tier) for group, _ in machines]
        inside = [self._of("node", group.name) for group, _ in machines]
        among = [self._of("inside", tier[0]) for tier in tiers]
        if len(machines) == 1:
            wire = inside[0] or among[0] or next(iter(self.wires), None)
            return Link(math.inf) if wire is None else wire.alone
        if self.servers_apart and (outer := among[places[0]]) is not None:
            return outer.alone
        return self._tiers([size for _, size in machines], places, inside, among)

    def _tiers(
        self, sizes: list[int], places: list[int], inside: list[ClusterLink | None], among: list[ClusterLink | None]
    ) -> Network:
        """The network in its general form."""
        used = sorted(set(places))
        tiers = self.tiers
        between = {pair: self._joining(tiers[pair[0]], tiers[pair[1]]) for pair in combinations(used, 2)}
        return Tiers(
            machines=tuple(sizes),
            tiers=tuple(used.index(place) for place in places),
            inside=_shortened(tuple(Link(math.inf) if wire is None else wire.network for wire in inside)),
            among=tuple(_or_that_beside(among[tier], tier, between) for tier in used),
            between=tuple(wire.network for wire in between.values()),
        )

    def wire_between(self, one: int, other: int, workers: int | None = None) -> ClusterLink:
        """Return the slowest link on the path between two workers, with the latency of the whole path.

        Raises:
            ConfigurationError: both ranks are the same.
        """
        if one == other:
            raise ConfigurationError(f"a link needs two different workers, got worker {one} twice; name two workers")
        ranks = [i for i, (_, size) in enumerate(self.placed(workers)) for _ in range(size)]
        groups = self.groups_by_rank(workers)
        here, there = groups[one].name, groups[other].name
        if ranks[one] == ranks[other]:
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
        firsts = list(self._representatives())
        if len(firsts) < 2:
            raise ConfigurationError(f"{self.name} has only one worker and therefore no slowest link; add a node")
        found = [self.wire_between(*pair) for pair in combinations(firsts, 2)]
        return max(found, key=lambda wire: (1 / wire.bandwidth, wire.latency))

    @property
    def link(self) -> costs.LinkModel:
        """Return the slowest link between any two workers, as a link model of the closed-form costs."""
        return self.slowest.cost

    def _representatives(self) -> Iterator[int]:
        """Workers among whom every kind of pair occurs: two of a group's first machine, and one of its second."""
        first = 0
        for group in self.groups:
            wanted = {0, min(1, group.workers - 1), group.workers if group.count > 1 else 0}
            yield from (first + one for one in sorted(wanted))
            first += group.size

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


def _check_names(cluster: ClusterShape) -> None:
    """Check that groups have different names, and that links name existing groups, each kind of link once."""
    names = [group.name for group in cluster.groups]
    if len(set(names)) != len(names):
        raise WrongValue(f"groups of nodes must have different names, got {listed(names)}; rename a group", "nodes")
    seen: set[tuple[str, ...]] = set()
    for number, wire in enumerate(cluster.wires):
        for name in wire.groups:
            if name not in names:
                raise WrongValue(
                    f"{wire.reach} must name existing groups of nodes ({', '.join(names)}), got {name!r}; add "
                    f"[nodes.{name}] or name an existing group",
                    "links",
                    number,
                    wire.reach,
                )
        ends = {next(tier for tier in cluster.tiers if name in tier) for name in wire.groups}
        if wire.reach == "between" and len(ends) < 2:
            raise WrongValue(
                f"between must connect two tiers, got {listed(wire.groups)}, which an inside link connects already; "
                "leave out one of the links",
                "links",
                number,
                "between",
            )
        keys = (
            {(wire.reach, *sorted(map(str, ends)))}
            if wire.reach == "between"
            else {(wire.reach, name) for name in wire.groups}
        )
        if keys & seen:
            raise WrongValue(
                f"{listed(wire.groups)} must have at most one link of each kind, got a second {wire.reach} link; "
                "leave out one of them",
                "links",
                number,
                wire.reach,
            )
        seen |= keys


def _check_joined(cluster: ClusterShape) -> None:
    """Check that every two workers are connected."""
    for group in cluster.groups:
        for reach, many, what in (("node", group.workers, "workers of a machine"), ("inside", group.count, "machines")):
            if many > 1 and cluster._of(reach, group.name) is None:  # type: ignore[arg-type]
                raise WrongValue(
                    f"the {many} {what} of {group.name} must be connected by a link, got none; add [[links]] {reach} "
                    f'= "{group.name}"',
                    "nodes",
                    group.name,
                )
    for here, there in combinations(cluster.tiers, 2):
        cluster._joining(here, there)


def _or_that_beside(
    wire: ClusterLink | None, tier: int, between: Mapping[tuple[int, int], ClusterLink]
) -> Link | FairLink:
    """The link of a tier; for a single machine without a link, one that never limits a message."""
    if wire is not None:
        return wire.alone
    return Link(max(one.bandwidth for pair, one in between.items() if tier in pair))


def _shortened(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """A tuple of one link if all links are equal."""
    return links[:1] if len(set(links)) == 1 else links


def _shares(sizes: list[int], total: int) -> list[int]:
    """Divide `total` in proportion to `sizes` into whole numbers that differ from the exact shares by less than one."""
    if total == sum(sizes):
        return sizes
    exact = [size * total / sum(sizes) for size in sizes]
    shares = [math.floor(one) for one in exact]
    rest = sorted(range(len(sizes)), key=lambda i: (shares[i] - exact[i], i))
    for i in rest[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _cores(group: MachineGroup, workers: int) -> int:
    """Number of cores that `workers` workers on a machine of the group use."""
    return workers if group.cores is None else min(group.cores, workers)


def _scale(law: ComputeModel, seconds: float) -> float:
    """Factor on the durations of `law` that makes their mean `seconds`."""
    if not 0 <= seconds < math.inf:
        raise ConfigurationError(f"seconds per gradient must be >= 0 and finite, got {seconds:g}; use 0.01 for 10 ms")
    mean = mean_of(law)
    if mean == 0 and seconds > 0:
        raise ConfigurationError(
            f"{law} takes no time and cannot be scaled to {seconds:g} s; use a compute model with a mean > 0"
        )
    return seconds / mean if mean else 1.0


def _times(law: ComputeModel, factors: tuple[float, ...]) -> ComputeModel:
    """`law` with each worker's durations multiplied by a factor."""
    if len(set(factors)) == 1:
        factors = factors[:1]
    return law if factors == (1.0,) else Speeds(law, factors)
