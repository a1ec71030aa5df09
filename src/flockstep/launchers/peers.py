"""The processes of a run as its supervisor knows them: the one table of who is expected, connected, done or lost.

Three write into it: whoever starts a process (`child`), the process itself by its messages (`link`, `step`, `done`),
and the supervisor, which decides that a process is lost. Everything else reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import FlockstepError
from flockstep.launchers.children import Child, how_it_ended
from flockstep.launchers.out_of_memory import OutOfMemoryDetector
from flockstep.links.bus import LAUNCHER
from flockstep.links.control import Frames, framed, unframed
from flockstep.links.wire import MAX_CODING, SenderIdentity
from flockstep.messages import Address, AnyNote, Message, node_name
from flockstep.nodes import Cluster, Hosts, View
from flockstep.records.events import Event, HostsEvent, LostEvent
from flockstep.runtime.member import Hello, NodeLost
from flockstep.runtime.part_group import held_by_servers
from flockstep.runtime.snapshot_tracker import NewestSnapshots, SnapshotTick
from flockstep.strategies.base import ResultPolicy, Strategy

SETTLING = 0.5
"""Seconds to wait, after a process has exited or its connection has closed, for the other of these two events, because
the last messages of the process may still arrive.
"""


FOR_ALL = ("lost", "left", "stop")
"""Tags of messages that a process must receive at once; they are sent on the process's own link and on the link of its
communicator.
"""


class ProcessLink:
    """A process of the run: the facts that it reported at its start, and the connection to it."""

    def __init__(self, frames: Frames, hello: Hello):
        """`frames` is the connection on which `hello` has arrived."""
        self.hello = hello
        self.frames = frames
        self.address = hello.address
        self.beside: ProcessLink | None = None
        """The link to the process's communicator, if it has opened one."""
        self._me = SenderIdentity(hello.run, LAUNCHER, hello.schema.hash, hello.largest)
        self._sent_count = 0

    def tell(self, tag: str, note: AnyNote | None = None, array: FlatArray | None = None) -> None:
        """Queue a message for the node without waiting.

        Messages that concern all processes also go to the node's communicator.

        The array must not change afterwards, because all links send it without a copy.
        """
        if self.beside is not None and tag in FOR_ALL:
            self.beside.tell(tag, note)
        self._sent_count += 1
        message = Message(LAUNCHER, tag, array, note or {}, number=self._sent_count)
        self.frames.send(framed(message, self._me))

    def dismiss(self, result: FlatArray | None, buffers: Mapping[Address, FlatArray | None]) -> None:
        """Tell the node that the run has ended; on request, send it the resulting model and the final buffers of every
        worker.
        """
        for rank, array in buffers.items():
            if array is not None and self.address >= 0:
                self.tell("buffers", {"rank": rank}, array)
        self.tell("end", None, result)

    def receive(self) -> Message | None:
        """Return the next message that has arrived from the node; None if no message has arrived.

        Raises:
            ProtocolError: the message breaks the protocol.
        """
        if self.beside is not None:  # a communicator says nothing but that it is alive
            while self.beside.receive() is not None:
                pass
        frames = self.frames.receive(self._me.model_bytes + MAX_CODING)
        return None if frames is None else unframed(frames, self.address, self._me)

    def disconnected(self) -> bool:
        """Return whether the process is gone, or has been stopped for longer than the heartbeat timeout."""
        return self.frames.disconnected()

    def close(self) -> None:
        """Close the link; queued messages are dropped."""
        self.frames.close()
        if self.beside is not None:
            self.beside.close()


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
    def parts(self) -> int:
        """Number of workers that hold one replica together."""
        return max(1, len(self.sizes))

    def newest_model(self, policy: ResultPolicy | None = None) -> tuple[SnapshotTick, FlatArray] | None:
        """Return the newest snapshots, and the model that `policy`, or the first one that the strategy names, selects
        from them; None if there are no snapshots.
        """
        if self.strategy is None or self.schema is None or not self.strategy.traits.results:
            return None
        tick = self.newest.tick({node // self.parts if node >= 0 else node for node in self.lost})
        if not tick.workers:
            return None
        held = held_by_servers(self.strategy, self.workers // self.parts, self.sizes or (self.schema.size,))
        model = tick.model(policy or self.strategy.traits.results[0], held)
        return None if model is None else (tick, model)

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
    at_once: bool = False
    """Whether workers go on with what their processes hold, so that the run does not go back to a checkpoint."""
    ends: str = ""
    """Why the run then ends with a checkpoint; empty if it goes on."""
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
    several = False
    """Whether the scripts have called `distribute` again."""

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
        self.cluster = Cluster(0)
        """The nodes of the run; none until the strategy is known."""
        self.workers, self.view = workers, View(epoch, tuple(range(workers)))
        self._heartbeat, self._hint, self._now = heartbeat, hint, now
        self._memory = memory or OutOfMemoryDetector()

    @property
    def running(self) -> bool:
        """Whether all nodes have begun, and none has been told that the run has ended."""
        return self.went is not None and not self.over

    def link(self, address: Address) -> ProcessLink:
        """Return the connection of a process that has joined."""
        link = self[address].link
        assert link is not None
        return link

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
