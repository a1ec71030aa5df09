"""Relates the parts of a split model to the whole model: which node holds which part, and addresses in the record."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from flockstep.drivers.node_metrics import Emit
from flockstep.drivers.part_group import PartGroup, groups_of
from flockstep.drivers.plan import Plan
from flockstep.nodes import Cluster
from flockstep.records.events import EvaluationEvent, Event, RefusedEvent, ReplicaEvent, UpdateEvent
from flockstep.strategies.base import Strategy


def held_by_servers(strategy: Strategy, replicas: int, sizes: Sequence[int]) -> list[slice]:
    """Return, for each server, the slice of the whole model that it holds; `sizes` are the numbers of elements of the
    parts.
    """
    return [
        slice(group.start + one.start, group.start + one.stop)
        for group in groups_of(sizes, 0)
        for one in strategy.held(replicas, group.stop - group.start)
    ]


def tracked(plan: Plan, sizes: Sequence[int]) -> tuple[Cluster, list[slice]]:
    """Return the replicas and servers whose parameters are evaluated, and the slice that each server holds; `sizes` are
    the numbers of elements of the parts.
    """
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
