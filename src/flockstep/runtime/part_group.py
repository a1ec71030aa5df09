"""The data-parallel groups of a split model, each with the workers and servers that hold the same part, and how their
addresses and events belong to the run of the whole model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import msgspec

from flockstep.arrays.schema import Schema
from flockstep.messages import Address, server
from flockstep.nodes import Cluster, Hosts, View
from flockstep.records.events import EvaluationEvent, Event, RefusedEvent, ReplicaEvent, UpdateEvent
from flockstep.runtime.node_metrics import Emit
from flockstep.runtime.plan import Plan
from flockstep.strategies.base import Strategy


@dataclass(frozen=True)
class PartGroup:
    """The workers and servers that hold one part of a split model.

    Within the group the workers are numbered by replica, and the servers from 0, as if the part were a whole model. In
    the whole run, worker `replica * parts + part` holds part `part` of a replica, and the servers of part 0 come first.
    """

    part: int
    parts: int
    servers: int
    """Number of servers in each part's group."""
    start: int
    """First element of the part in the flat array of the whole model."""
    stop: int

    @property
    def span(self) -> slice:
        """Slice of the part in the flat array of the whole model."""
        return slice(self.start, self.stop)

    def schema(self, whole: Schema) -> Schema:
        """Return the schema of the part, given the schema of the whole model."""
        within = [entry for entry in whole.entries if self.start <= entry.offset < self.stop]
        return Schema(whole.dtype, tuple(replace(entry, offset=entry.offset - self.start) for entry in within))

    def outside(self, address: Address) -> Address:
        """Return the address, in the whole run, of a node of this group."""
        return address * self.parts + self.part if address >= 0 else address - self.part * self.servers

    def inside(self, address: Address) -> Address | None:
        """Return the address, in this group, of a node of the run; None if the node belongs to another group."""
        if address >= 0:
            return address // self.parts if address % self.parts == self.part else None
        index = -1 - address
        return server(index % self.servers) if index // self.servers == self.part else None

    def view(self, view: View) -> View:
        """Return the view of this group: the replicas whose worker in this group still takes part in the run."""
        return View(view.epoch, tuple(rank // self.parts for rank in view.ranks if rank % self.parts == self.part))

    def hosts(self, hosts: Hosts) -> Hosts:
        """Return, for each host, the replicas whose worker in this group runs on that host."""
        found = (tuple(rank // self.parts for rank in host if rank % self.parts == self.part) for host in hosts)
        return tuple(host for host in found if host)


@dataclass(frozen=True)
class ReplicaParts:
    """The parts of a replica that several processes of a script hold."""

    schema: Schema
    """The tensors of all parts, one part after another; a tensor's name tells its placement."""
    sizes: tuple[int, ...]
    """Number of elements of each part."""


@dataclass(frozen=True)
class NodePart:
    """The part of a split model that a node holds."""

    name: str
    """Name of the part and of its holder, for sentences."""
    group: PartGroup
    sizes: tuple[int, ...] = ()
    """Number of elements of each part, of a worker whose script has split the model; the supervisor then does not know
    the parts' values, and the group's first worker has them.
    """


def groups_of(sizes: Sequence[int], servers: int) -> list[PartGroup]:
    """Return the groups of a model with parts of the given `sizes`; `servers`: number of servers of each."""
    spans = pairwise(accumulate(sizes, initial=0))
    return [PartGroup(part, len(sizes), servers, start, stop) for part, (start, stop) in enumerate(spans)]


def held_by_servers(strategy: Strategy, replicas: int, sizes: Sequence[int]) -> list[slice]:
    """Return, for each server, its slice of the whole model, whose parts have the given `sizes`."""
    return [
        slice(group.start + one.start, group.start + one.stop)
        for group in groups_of(sizes, 0)
        for one in strategy.held(replicas, group.stop - group.start)
    ]


def tracked(plan: Plan, sizes: Sequence[int]) -> tuple[Cluster, list[slice]]:
    """Return the replicas and servers that are evaluated, and each server's slice, for parts of these `sizes`."""
    cluster = plan.cluster if len(sizes) == 1 else Cluster(plan.cluster.workers, plan.cluster.servers * len(sizes))
    return cluster, held_by_servers(plan.strategy, plan.cluster.workers, sizes)


def with_addresses_of_run(event: Event, group: PartGroup) -> Event:
    """Return an event of the given group in which the other node's address in the group is replaced by the node's
    address in the whole run; an event that names no other node is returned unchanged.
    """
    if isinstance(event, UpdateEvent | RefusedEvent) and event.source is not None:
        return msgspec.structs.replace(event, source=group.outside(event.source))
    return event


def by_worker(emit: Emit, parts: int) -> Emit:
    """Return a function that passes a tracker's events to `emit`, with replicas converted to workers.

    A replica gets the rank of the worker that holds its first part, and the number of sent bytes is divided by the
    number of parts.
    """
    return emit if parts == 1 else partial(_of_replica, emit, parts)


def _of_replica(emit: Emit, parts: int, event: Event) -> None:
    if isinstance(event, ReplicaEvent):
        event = msgspec.structs.replace(event, rank=event.rank * parts)
    elif isinstance(event, EvaluationEvent):
        event = msgspec.structs.replace(event, sent_bytes=event.sent_bytes / parts)
    emit(event)
