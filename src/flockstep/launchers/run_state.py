"""The state of a supervised run: the outcome so far, the nodes that take part, and the progress."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from flockstep.arrays.schema import Schema
from flockstep.drivers.part_group import held_by_servers
from flockstep.drivers.snapshot_tracker import NewestSnapshots
from flockstep.errors import FlockstepError
from flockstep.launchers.node_progress import NodeProgress
from flockstep.messages import Address
from flockstep.nodes import Hosts, View
from flockstep.records.events import Event, HostsEvent, LostEvent
from flockstep.strategies.base import Strategy


@dataclass
class Outcome:
    """Result of a supervised run, as far as it is known."""

    workers: int = 0
    schema: Schema | None = None
    strategy: Strategy | None = None
    newest: NewestSnapshots = field(default_factory=NewestSnapshots)
    warnings: list[str] = field(default_factory=list)
    hosts: Hosts = ()
    """The workers of each host; empty until all nodes have joined."""
    lost: dict[Address, LostEvent] = field(default_factory=dict)
    error: FlockstepError | None = None
    replaced: set[Address] = field(default_factory=set)
    """Lost processes of servers whose place another process has taken."""
    change: Change | None = None
    """Change of the workers with which the run continues; None if the run has ended."""
    nodes: set[Address] = field(default_factory=set)
    """Nodes whose events are written to files of the record."""
    sizes: tuple[int, ...] = ()
    """Number of elements of each part of a split model; empty if every worker holds a whole replica."""

    @property
    def held(self) -> list[slice]:
        """Slice of the model that each server holds; known once the nodes have joined."""
        assert self.strategy is not None
        assert self.schema is not None
        sizes = self.sizes or (self.schema.size,)
        return held_by_servers(self.strategy, self.workers // len(sizes), sizes)

    def warn(self, text: str) -> None:
        """Add a sentence to the warnings, unless they already contain it."""
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def events(self) -> list[Event]:
        """Return the events that only the supervisor knows, for the record: the hosts, if there are several, and the
        lost nodes.
        """
        hosts = [HostsEvent(0.0, self.hosts)] if len(self.hosts) > 1 else []
        return [*hosts, *self.lost.values()]


@dataclass
class Change:
    """Workers that leave a run, are lost, or join it, while the other workers continue; no rank is gone if a server is
    lost.
    """

    gone: set[int]
    reason: str
    joined: int = 0
    """Number of workers that join."""
    renamed: bool = False
    """Whether ranks change although the number of workers stays, because the newest checkpoint lacks lost workers."""
    since: float = field(default_factory=time.monotonic)
    """Time at which the nodes had stopped, in seconds of the monotonic clock."""


@dataclass
class RunState:
    """The nodes of a supervised run, and the progress of the run."""

    workers: int
    """Number of workers at the start of the run."""
    outcome: Outcome
    view: View
    """View of the workers that take part in the run now."""
    standings: dict[Address, NodeProgress]
    ready: set[Address] = field(default_factory=set)
    """Nodes that have reported that they are ready to begin."""
    done: set[Address] = field(default_factory=set)
    """Nodes whose programs have ended."""
    unfinished: dict[Address, int] = field(default_factory=dict)
    """Worker whose script has ended without `finish()` → its last step."""
    early: dict[Address, str] = field(default_factory=dict)
    """Those of these workers that have taken fewer steps than another worker → sentence about the end of the script."""
    gone: set[Address] = field(default_factory=set)
    """Addresses of the nodes that were lost."""
    condemned: dict[Address, str] = field(default_factory=dict)
    """Worker to be removed from the run → reason."""
    went: float | None = None
    """Time at which all nodes were ready, in seconds of the monotonic clock, minus the seconds that the run lasted
    before it was resumed.
    """
    over: bool = False
    """Whether all nodes have been told that the run has ended."""

    @property
    def running(self) -> bool:
        """Whether all nodes have begun, and none has been told that the run has ended."""
        return self.went is not None and not self.over

    @property
    def missed(self) -> set[Address]:
        """Lost nodes that no backup has replaced."""
        return self.gone - self.outcome.replaced
