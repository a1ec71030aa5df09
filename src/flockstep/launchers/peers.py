"""The processes of a run as its supervisor knows them: the one table of who is expected, connected, done or lost.

Three write into it: whoever starts a process (`child`), the process itself by its messages (`link`, `step`, `done`),
and the supervisor, which decides that a process is lost. Everything else reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from flockstep.arrays.schema import Schema
from flockstep.errors import FlockstepError
from flockstep.launchers.children import Child, how_it_ended
from flockstep.launchers.link import ProcessLink
from flockstep.launchers.out_of_memory import OutOfMemoryDetector
from flockstep.messages import Address, node_name
from flockstep.nodes import Cluster, Hosts, View
from flockstep.records.events import Event, HostsEvent, LostEvent
from flockstep.runtime.member import NodeLost
from flockstep.runtime.part_group import held_by_servers
from flockstep.runtime.snapshot_tracker import NewestSnapshots
from flockstep.strategies.base import Strategy

SETTLING = 0.5
"""Seconds to wait, after a process has exited or its connection has closed, for the other of these two events, because
the last messages of the process may still arrive.
"""


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

    def warn(self, text: str, say: Callable[[str], None] = lambda text: None) -> None:
        """Add a sentence to the warnings, and say it, unless they already contain it."""
        if text not in self.warnings:
            say(text)
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


@dataclass(eq=False)
class RunPeer:
    """One process of a run."""

    state: Literal["starting", "running", "done", "lost", "failed"] = "starting"
    """What the display shows."""
    step: int = 0
    loss: float | None = None
    """Loss at the last step."""
    child: Child | None = None
    """The process, if this host or an agent has started it."""
    link: ProcessLink | None = None
    """The connection, from the process's hello until its loss."""
    asked: bool = False
    """Whether the script of this worker has begun the later call of `distribute` to which this table belongs."""
    ready: bool = False
    """Whether the node has reported that it is ready to begin."""
    done: bool = False
    """Whether the node's program has ended."""
    unfinished: int | None = None
    """Last step of a worker whose script has ended without `finish()`."""
    early: str = ""
    """Sentence about the end of such a script before another worker's, once it is known."""
    condemned: str = ""
    """Reason for which the worker is to be removed from the run."""
    gone: bool = False
    """Whether the process was lost."""
    told: NodeLost | None = None
    """What the other nodes were told of the loss."""
    broken: bool = False
    """Whether the link was seen broken."""
    since: float | None = None
    """Time at which the process was first seen ended, or its link broken."""


class RunPeers(dict[Address, RunPeer]):
    """Address → process, for all processes that a run expects: its workers, and its servers once they are known."""

    went: float | None = None
    """Time at which all nodes were ready, in seconds of the monotonic clock, minus the seconds that the run lasted
    before it was resumed.
    """
    over = False
    """Whether all nodes have been told that the run has ended."""

    def __init__(
        self,
        workers: int,
        heartbeat: float,
        epoch: int = 0,
        hint: str = "",
        memory: OutOfMemoryDetector | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        """Expect `workers` workers. `heartbeat`: seconds after which a link breaks whose process is stopped. `epoch`:
        number of changes of the workers so far. `hint`: clause for a script that ends without joining the run.
        """
        super().__init__({rank: RunPeer() for rank in range(workers)})
        self.workers, self.view = workers, View(epoch, tuple(range(workers)))
        self._heartbeat, self._hint, self._now = heartbeat, hint, now
        self._memory = memory or OutOfMemoryDetector()

    @property
    def running(self) -> bool:
        """Whether all nodes have begun, and none has been told that the run has ended."""
        return self.went is not None and not self.over

    @property
    def links(self) -> dict[Address, ProcessLink]:
        """The connections of the processes that have joined and are not lost."""
        return {address: one.link for address, one in self.items() if one.link is not None}

    @property
    def children(self) -> dict[Address, Child]:
        """The processes that this host, or an agent, has started."""
        return {address: one.child for address, one in self.items() if one.child is not None}

    @property
    def gone(self) -> set[Address]:
        """The processes that were lost."""
        return {address for address, one in self.items() if one.gone}

    @property
    def missed(self) -> set[Address]:
        """Those in whose place no backup continues."""
        return {address for address, one in self.items() if one.gone and not (one.told and one.told.replaced)}

    @property
    def done(self) -> set[Address]:
        """The nodes whose programs have ended."""
        return {address for address, one in self.items() if one.done}

    @property
    def least_step(self) -> int:
        """Number of steps of the slowest worker that is not lost."""
        return min((one.step for address, one in self.items() if address >= 0 and not one.gone), default=0)

    def ended(self, address: Address) -> bool:
        """Return whether a process is known to have ended."""
        one = self[address]
        return one.child.exit_code() is not None if one.child is not None else one.link is None or _is_broken(one)

    def left(self, address: Address) -> bool:
        """Return whether a process has closed its link or has ended."""
        one = self[address]
        return one.link is None or _is_broken(one) or self.ended(address)

    def how_lost(self, address: Address) -> str | None:
        """Return text that says how a process was lost; None if it is alive, or if its last messages may still arrive.

        A link breaks if the process is stopped for longer than the heartbeat, or closes its end. If this host started
        the process, the exit code also shows that, and how, the process ended.
        """
        one = self[address]
        code, broken = None if one.child is None else one.child.exit_code(), _is_broken(one)
        if code is None and not broken:
            return None
        one.since = self._now() if one.since is None else one.since
        if (code is None or not broken) and self._now() - one.since < SETTLING:
            return None
        if code is None:
            ended = "" if one.child is not None else "has ended, or "
            return f"{node_name(address)} {ended}has not answered for {self._heartbeat:g} s"
        remark = None if one.child is None else one.child.reason  # of another host, about its own memory
        how = f"{node_name(address)} {how_it_ended(code)}{self._memory.explain(code) if remark is None else remark}"
        if code == 0 and one.link is None:
            how += " without joining the run (a script joins it by calling flockstep.distribute or flockstep.join)"
            how += self._hint
        return how

    def dying(self) -> bool:
        """Return whether a process has ended or cannot be reached, and `how_lost` waits for its last messages."""
        return any(one.since is not None and not one.gone for one in self.values())


def _is_broken(one: RunPeer) -> bool:
    one.broken |= one.link is not None and one.link.disconnected()
    return one.broken


def successor(cluster: Cluster, address: Address, gone: Iterable[Address]) -> tuple[Address, bool] | None:
    """Return the process of a server that continues after the loss of process `address`, and whether it takes that
    process's place, instead of losing a backup; None if no process of the server is left. `gone`: all lost processes.
    """
    if address >= 0:
        return None
    chain = cluster.chain(cluster.logical(address))
    leads = next((one for one in chain if one not in gone), None)
    return None if leads is None else (leads, chain.index(leads) > chain.index(address))
