"""A process's membership of a run: how it joins, and the messages between it and the supervisor.

node → supervisor   Hello, on a connection to the control socket: who it is, where it listens, what it holds; from
                    then on the connection is the node's link
supervisor → node   "welcome": the nodes of the run, and the addresses of the peers
node ⇄ node         greetings of their buses, until all pairs are connected; then rank 0's parameters, forwarded along
                    a tree; if the model is split, instead supervisor → node "values": the values of the node's part
node ⇄ supervisor   "clock", a few times, to measure the offset between the node's clock and the supervisor's clock
node → supervisor   "ready"; supervisor → node "go": the time on the supervisor's clock at which the run's clock started
node → supervisor   "alive" after some time without a message; sending it fails if the link is broken
node → supervisor   "events" for the record; "waiting": what the node waits for; "unfinished", "done" or "failed";
                    "quarantine": a worker to remove from the run;
                    "gradient", "settings", "data": digests that the supervisor compares between workers;
                    "checkpoint": how far the node is with one; "flight": its last messages, after a fault; "tape": what
                    entered the program of a node on another host;
                    "call", "communicator": a further call of `distribute`, and that of `join`, begins
                    "snapshot", followed by its parameters in one or more "part" messages
supervisor → node   "taken" for each "part"
node → supervisor   "leave": a signal asks this worker to leave the run
supervisor → node   "again": wait until the run continues with other workers, take part in that run, or leave
supervisor → node   "lost": a node died; "left": a worker is done; "stop": end now;
                    "end": leave, with the resulting model if requested

A process that fails before its Hello sends a Failure to the control socket instead, and `flockstep join` a JoinRequest.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import math
import os
import re
import select
import shutil
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError, FlockstepError, Interrupted, PeerLost, RunError
from flockstep.links import control
from flockstep.links.bus import LAUNCHER, Traffic
from flockstep.links.connection import LINK_TIMEOUT
from flockstep.links.kinds import Transport
from flockstep.links.shared_group import SharedGroup, needed, room_for, warm_up
from flockstep.links.shared_memory import SharedMemory, host_here
from flockstep.links.wire import HANDED_ON, HOST_MEMORY, PROTOCOL, SenderIdentity
from flockstep.messages import Address, Fields, Message, Note, Notes, Wanted, node_name
from flockstep.nodes import BadGradients, Cluster, Hosts, View
from flockstep.partitions.split_facts import SplitFacts
from flockstep.records.failpoints import reach
from flockstep.records.tape import (
    TAPES,
    MappedFile,
    SentTape,
    TapeHeader,
    TapeWriter,
    is_sent,
    tape_file,
    without_secret,
)
from flockstep.runtime.clock import ROUND_TRIPS, ClockOffset, RoundTrip, offset_of
from flockstep.runtime.replication import NOTES as REPLICAS
from flockstep.runtime.tape import RecordingTape, Tape
from flockstep.runtime.user_code import said_of

if TYPE_CHECKING:
    from flockstep.runtime.part_group import NodePart

LONGEST = 4000
"""Maximum number of characters of a reason or a traceback in a message's header."""
PAUSE = 0.05
"""Seconds to wait before a message is sent again to a process whose queue was full."""
LOSS_TOLD = 3
"""Heartbeats after which a node ends the run because a connection has broken. The supervisor gives the host of a dead
node up after 2, and says so in its own words.
"""
PART = 1 << 18
"""Maximum number of bytes of parameters in one message to the supervisor; a larger array is sent in several parts."""
WINDOW = 8
"""Maximum number of unacknowledged parts; the supervisor stores at most this many parts of each node."""
NO_MEMORY = re.compile("can't allocate memory|not enough memory|Cannot allocate memory")
"""Phrases in errors of torch or of the system that show that memory could not be allocated."""
PATIENCE = 1.0
"""Maximum number of seconds of one wait for a message; signals are handled between two waits."""
LISTENED = 16
"""Largest number of messages of other nodes that a node receives before it reads what the supervisor has said."""
SILENT = 84
"""Exit code of a process that ends because its supervisor does not answer. The supervisor learns the reason from this
code alone.
"""


class SupervisorSilent(Interrupted):
    """Raised when the supervisor does not answer, although its process has not ended."""

    exit_code = SILENT


class Hello(msgspec.Struct, forbid_unknown_fields=True, tag="hello"):
    """The first message of a process that joins a run; `optimizer` is an encoded `Optimizer`."""

    protocol: int
    run: str
    address: int
    bus: str
    """Address at which the node's bus listens."""
    host: str
    """Identifier of the node's host."""
    strategy: str
    optimizer: dict[str, str | int | float | bool]
    schema: Schema
    largest: int
    beside: bool = False
    """Whether this is the communicator of a process that has said hello already."""
    repeats: bool = False
    """Whether the script can take a step again with other workers, from the state that its process holds."""
    sizes: tuple[int, ...] = ()
    """Number of elements of each part of the model, of a script that has split it; otherwise empty."""


class Welcome(Note, frozen=True):
    """Message that the run is about to begin: its nodes, their hosts and buses, and the shared memory if there is
    any.
    """

    view: View
    hosts: Hosts
    servers: int
    peers: dict[int, str]
    memory: str = ""
    replicas: int = 0
    """Number of backup processes of each server."""


class NodeLost(Note, frozen=True):
    """Message that a node of the run is lost, with the reason; `view` lists the remaining nodes."""

    address: int
    reason: str
    view: View
    replaced: bool = False
    """Whether another process continues the server to which the lost process belonged."""


SAID: Notes = {"welcome": Welcome, "lost": NodeLost}
"""Message tag → type of the note, for messages of the supervisor whose notes contain objects; other notes contain only
numbers and texts.
"""


class Failure(msgspec.Struct, forbid_unknown_fields=True, tag="failure"):
    """Message that a process cannot join or continue; `kind` is the name of an error class of flockstep, `trace` a
    traceback.
    """

    run: str
    address: int
    kind: str
    reason: str
    trace: str


@dataclass(frozen=True)
class NodeSpec:
    """Node specification: the settings with which a process joins a run, given to the process by the supervisor that
    starts it.
    """

    run: str
    address: Address
    control: str
    directory: str
    transport: str
    heartbeat: float
    """Seconds without a heartbeat after which a node counts as lost."""
    record: str
    """Path of the run's folder."""
    workers: int
    supervisor: int
    """Process id of the supervisor if it is on this host: this process ends as soon as the supervisor does. 0 if the
    supervisor is on another host; then only the broken link shows that it has ended.
    """
    replica_size: int = 1
    """Number of workers whose scripts hold one replica of the model together."""
    replica_over_hosts: bool = False
    """Whether the processes of one replica may run on several hosts."""
    process: int = 0
    """Process id of the only process that may use this specification; 0 if every process that receives the
    specification may use it.
    """
    claimed: int = 0
    """Number of calls in this process that have used the specification: calls of `distribute`, and `join` if it was
    called first.
    """
    call: int = 1
    """Number of the call to `distribute` that uses this specification, from 1."""
    seed: int = 0
    """Seed of the nodes' random streams."""
    strategy: str = ""
    """Strategy that replaces the one that a script names; empty if the script's own is used."""
    imports: tuple[str, ...] = ()
    """Files that register custom components, for a script to import."""
    bad_gradients: BadGradients = dataclasses.field(default_factory=BadGradients)
    """Policy for gradients that are not finite or too large."""
    secret: str = dataclasses.field(default="", repr=False)
    """Secret of the run in hexadecimal digits, which both ends of its TCP connections must know."""
    link_timeout: float = LINK_TIMEOUT
    """Seconds for which the connection to another host may be interrupted before a node counts as lost."""
    facts: SplitFacts | None = None
    """Facts about the whole model, such as where it is cut, if this process holds one part of a split model; otherwise
    None.
    """
    changes: bool = False
    """Whether workers of the run may leave and join."""
    joins: bool = False
    """Whether this worker joins others that go on with what their processes hold, and takes its state from one."""
    tapes: str = ""
    """Folder for what enters the nodes' programs, see `is_sent`; empty if the run cannot be replayed."""
    follows: str = ""
    """Folder of the tapes that this process repeats; empty if it does not repeat a run."""
    checkpoint: str = ""
    """Folder of the checkpoint from which the node continues; empty if the run starts from the beginning. On another
    host than the coordinator's, a relative path is relative to `directory`.
    """

    def of_call(self, number: int) -> NodeSpec:
        """Return the specification for the process's call number `number` of `distribute`.

        Each call has its own run and record.
        """
        record = str(folder_of_call(Path(self.record), number))
        tapes, follows = (
            str(folder_of_call(Path(folder).parents[1], number) / TAPES / "0")  # a later call has one segment
            if folder and number > 1 and not is_sent(folder)
            else folder
            for folder in (self.tapes, self.follows)
        )
        run = run_of_call(self.run, number)
        return dataclasses.replace(self, call=number, run=run, record=record, tapes=tapes, follows=follows)


def run_of_call(run: str, number: int) -> str:
    """Identifier of the run of a script's call number `number` of `distribute`."""
    return run if number == 1 else f"{run}.{number}"


def folder_of_call(record: Path, number: int) -> Path:
    """Folder of the record of a script's call number `number` of `distribute`."""
    return record if number == 1 else record / f"distribute-{number}"


AGAIN = "again"
"""Tag of the message that tells a worker to take part in the run with other workers, or to leave."""


class BeginAgain(Exception):
    """Message that the run continues with other workers: the process takes part with another `node_spec`, or leaves."""

    def __init__(self, node_spec: NodeSpec | None, config: str, waits: bool):
        """`node_spec`: None if the process leaves, or `waits` for another message; `config`: as TOML."""
        super().__init__("the run continues with other workers")
        self.node_spec, self.config, self.waits = node_spec, config, waits


def on_same_host(again: NodeSpec, before: NodeSpec) -> NodeSpec:
    """Return the node specification with which a process continues; on another host than the coordinator's, with that
    host's own folders.
    """
    if again.control:
        return again
    names = ("control", "directory", "transport", "supervisor", "imports", "tapes")
    places = {name: getattr(before, name) for name in names}
    return dataclasses.replace(again, **places)


def begin_again(message: Message) -> BeginAgain:
    """Decode a supervisor's message with the tag `AGAIN`."""
    spec = str(message.note["spec"])
    node_spec = msgspec.json.decode(spec, type=NodeSpec) if spec else None
    return BeginAgain(node_spec, str(message.note["config"]), bool(message.note["wait"]))


class Member:
    """The membership of this process in a run: its links to the supervisor and to the other nodes."""

    def __init__(
        self,
        node_spec: NodeSpec,
        schema: Schema,
        largest: int = 0,
        notes: Notes = REPLICAS,
        sums: bool = False,
        now: Callable[[], float] = time.monotonic,
    ):
        """Prepare to join the run that a node specification names.

        Args:
            largest: size in bytes of the largest array that this process sends, if larger than the model.
            notes: the kinds of notes that messages to this process carry.
            sums: whether this process computes sums over all workers; their kernels are loaded before the start.
            now: the clock of this process's host, in seconds.
        """
        self.node_spec = node_spec
        self._sums = sums
        self._now = now
        self.clock = ClockOffset(0.0, math.inf)
        """Offset of this host's clock to the supervisor's."""
        self._went = 0.0
        self.largest = max(schema.nbytes, largest)
        self.schema = schema
        secret = bytes.fromhex(node_spec.secret)
        me = SenderIdentity(node_spec.run, node_spec.address, schema.hash, self.largest, notes=notes, secret=secret)
        transport, folder = Transport.parse(node_spec.transport), Path(node_spec.directory)
        name = node_name(node_spec.address).replace(" ", "-")
        if node_spec.call == 1 or node_spec.address < 0:
            with contextlib.suppress(OSError):  # what `ps` and `top` call this process, on Linux
                Path("/proc/self/comm").write_text(name)
        name = name if node_spec.call == 1 else f"{name}.{node_spec.call}"
        name += f"-{node_spec.run[:4]}"  # the runs of a host's agent have one folder
        try:
            self.line = control.Line(dataclasses.replace(me, notes=SAID), node_spec.control, node_spec.heartbeat)
        except PeerLost:
            raise _supervisor_silent() from None
        self.bus = transport.bus(me, folder, name, node_spec.heartbeat, node_spec.link_timeout)
        self._reads_peers, self._me = transport.zero_copy, me
        self.closed = False
        self.memory: SharedMemory | None = None
        """Segment that all nodes of this run share; None if they share none."""
        self.host_memory: SharedMemory | None = None
        """Segment that the workers of this host share, if the run has several hosts; None if they share none."""
        self.view: View
        """Nodes of the run at its start."""
        self.hosts: Hosts
        """The workers of each host."""
        self._introduced = False
        self._untaken = self._unheard = 0
        self._replicated = False
        """Whether the servers of the run have backups."""
        self._early: deque[Message] = deque()
        self.tape: Tape | None = None
        """What enters this node's program, if the run can be replayed."""

    def begin_call(self, node_spec: NodeSpec) -> NodeSpec:
        """Tell the supervisor of the process's first call to `distribute` about a later call, and wait until the
        supervisor is ready for it.

        Returns:
            The node specification of the later call, with the folder of that call's sockets.

        Raises:
            Interrupted: the run has failed, or the supervisor is gone.
        """
        self.tell("call", None, {"number": node_spec.call})
        while True:
            self.line.wait(PATIENCE)
            message = self._heard()
            if message is None:
                self.tell("alive")
            elif message.tag == "call":  # on another host the agent's folder serves all calls
                return dataclasses.replace(node_spec, directory=message.note.get("directory", node_spec.directory))
            elif message.tag == "stop":
                raise stopped(message)
            else:
                self._early.append(message)

    def join(
        self,
        strategy: str,
        optimizer: dict[str, str | int | float | bool],
        initial: FlatArray | None,
        part: NodePart | None = None,
        repeats: bool = False,
    ) -> tuple[Cluster, FlatArray]:
        """Join the run; return its cluster, and the parameters that every node starts from, read-only.

        A job's node that holds one `part` of a split model gets the bytes of `ModelPart.values`, from the supervisor; a
        script's node gets the parameters of the first node with the same part.
        `repeats`: see `Hello`.

        The node prepares what it needs, and then calls `begin`.

        Raises:
            ConfigurationError: the supervisor refused, for example because another worker's model differs.
        """
        self.introduce(strategy, optimizer, repeats=repeats, sizes=() if part is None else part.sizes)
        welcome = self.wait_for("welcome")
        self.view, self.hosts = welcome.note.view, welcome.note.hosts
        self._replicated = welcome.note.replicas > 0
        reach("meeting.begun")
        self._servers = welcome.note.servers
        cluster = Cluster(len(self.view.ranks), self._servers, replicas=welcome.note.replicas)
        if welcome.note.memory:
            self.memory = SharedMemory.attach(
                welcome.note.memory, needed(cluster.workers, room_for(self.schema.nbytes))
            )
            if self._sums and cluster.workers > 1:
                warm_up()
        self._meet(welcome.note.peers)
        self._share_on_host()
        if self.node_spec.facts is not None:
            params = self.wait_for("values").payload
        else:
            alike = [one for one in cluster.processes if part is None or part.group.inside(one) is not None]
            params = self._handed_on(initial, alike)
        self.bus.traffic = Traffic(rejected=self.bus.traffic.rejected)  # messages from here on, of the run itself
        return cluster, params

    def expect(self, received: Mapping[Address, int]) -> None:
        """Set the number of messages that each peer had sent to this node up to the checkpoint from which the run
        continues.
        """
        # Messages between a server with backups and its peers are numbered anew in a resumed run.
        anew = {peer for peer in received if self._replicated and min(peer, self.node_spec.address) < 0}
        self._me.heard.update({peer: n for peer, n in received.items() if peer not in anew})

    def begin(self) -> None:
        """Compare the clocks, tell the supervisor that this node is ready, and wait until all nodes are ready; then the
        run's clock starts.
        """
        trips = []
        for _ in range(ROUND_TRIPS):
            sent = self._now()
            self.tell("clock")
            note = self.wait_for("clock").note
            trips.append(RoundTrip(sent, float(note["heard"]), float(note["answered"]), self._now()))
        self.clock = offset_of(trips)
        self.tell("ready")
        self._went = float(self.wait_for("go").note["at"])
        self.bus.release()  # every node has the first model
        if self.node_spec.tapes:
            self.tape = self._recorded()

    def _recorded(self) -> RecordingTape:
        spec, memory = self.node_spec, (self.memory is not None, self.host_memory is not None)
        text = without_secret(msgspec.json.encode(dataclasses.asdict(spec)).decode())
        place = spec.address, self.view.epoch, self.view.ranks, self.hosts, self._servers
        sent, file = is_sent(spec.tapes), tape_file(Path(spec.tapes), spec.address)
        sink = SentTape(self._send_tape) if sent else MappedFile(file)
        return RecordingTape(TapeWriter(sink, TapeHeader(*place, *memory, text)))

    def _send_tape(self, data: bytes) -> None:
        self.tell("tape", np.frombuffer(data, np.uint8), {"segment": self.node_spec.tapes})

    def group(self, segment: SharedMemory, rank: int, workers: int) -> SharedGroup:
        """Return the place of this process among the `workers` processes that share a segment."""
        return SharedGroup(segment, rank, workers, room_for(self.schema.nbytes))

    def seconds(self) -> float:
        """Return the seconds since all nodes were ready, by the supervisor's clock."""
        return self._now() + self.clock.seconds - self._went

    def meet_all(self, tag: str) -> None:
        """Wait for the supervisor's message `tag`, which contains the addresses of all peers, and then for the
        connections to all peers to open.
        """
        self._meet(msgspec.json.decode(str(self.wait_for(tag).note["peers"]), type=dict[int, str]))

    def _handed_on(self, model: FlatArray | None, nodes: Sequence[Address]) -> FlatArray:
        """Receive the first node's model and send it to two further nodes, so that no node sends it to all."""
        me = self.node_spec.address
        place = nodes.index(me)
        if place:
            model = self.wait_for(HANDED_ON, nodes[(place - 1) // 2]).payload
        assert model is not None
        for child in nodes[2 * place + 1 : 2 * place + 3]:
            self._send_before_start(child, Message(me, HANDED_ON, model))
        return model

    def _send_before_start(self, to: Address, message: Message) -> None:
        """Send a message to a peer, keeping what arrives while there is no room for it."""
        while True:
            with contextlib.suppress(PeerLost):  # full, or the node is dead, which the supervisor will report
                self.bus.send(to, message)
                return
            self._require_connected(to)
            if (heard := self._heard() or self.bus.poll(PAUSE, self.line.descriptors)) is not None:
                self._early.append(self._checked(heard))

    def _require_connected(self, peer: Address) -> None:
        """Raise `PeerLost` if the connection to a peer broke although both live, which the supervisor does
        not notice.
        """
        if peer in self.bus.broken(LOSS_TOLD * self.node_spec.heartbeat):
            raise PeerLost(
                f"{self.bus.why_broken(peer)} before the run began, although both processes are alive; let the "
                f"firewall allow the workers' ports, which --transport \"tcp(memory=true, ports='29500-29600')\" limits"
            )

    def _share_on_host(self) -> None:
        """Share memory for sums with the other workers of this host, if the run has several hosts."""
        me = self.node_spec.address
        host = next((host for host in self.hosts if me in host), ())
        if not self._sums or not self._reads_peers or len(self.hosts) == 1 or len(host) < 2:
            return
        if me == host[0]:
            self.host_memory = SharedMemory.create(needed(len(host), room_for(self.schema.nbytes)))
            for peer in host[1:]:
                note: Fields = {"address": self.host_memory.address}
                self._send_before_start(peer, Message(me, HOST_MEMORY, note=note))
        else:
            address = str(self.wait_for(HOST_MEMORY, host[0]).note["address"])
            self.host_memory = SharedMemory.attach(address, needed(len(host), room_for(self.schema.nbytes)))
        warm_up()

    def tell(self, tag: str, array: FlatArray | None = None, note: Fields | None = None) -> None:
        """Send a message to the supervisor.

        Raises:
            Interrupted: the supervisor is gone.
        """
        if tag in ("events", "done") and self.tape is not None:
            self.tape.flush()
        try:
            self.line.send(tag, note, array)
        except PeerLost:
            raise _supervisor_silent() from None

    def send_in_parts(self, note: Fields, arrays: Sequence[FlatArray]) -> None:
        """Send a snapshot to the supervisor: `note` with its description, then the bytes of the arrays in parts.

        Raises:
            Interrupted: the supervisor is gone.
        """
        self.tell("snapshot", None, note)
        for array in arrays:
            data = np.ascontiguousarray(array).view(np.uint8)
            for start in range(0, len(data), PART):
                while self._untaken >= WINDOW:
                    self.line.wait(PATIENCE)
                    if (message := self._heard()) is not None:
                        self._early.append(message)
                        if message.source == LAUNCHER and message.tag == AGAIN:  # nobody takes the other parts
                            return
                    elif self._untaken >= WINDOW:
                        self.tell("alive")
                self._untaken += 1
                self.tell("part", data[start : start + PART])

    def fail(self, failure: Failure) -> None:
        """Report a failure of this process to the supervisor, if the supervisor is still running."""
        if not self._introduced:
            send_to_control(self.node_spec, failure)
            return
        with contextlib.suppress(Interrupted):
            self.tell("failed", None, {"kind": failure.kind, "reason": failure.reason, "trace": failure.trace})

    def receive(self, seconds: float | None, also: int | None = None, wanted: Wanted | None = None) -> Message | None:
        """Return the next message from a node or the supervisor; None if no message arrives within `seconds`, or if a
        descriptor in `also` becomes readable.

        The array of a `wanted` message may be received directly into the memory where it is needed.
        """
        if self._early:
            early = self._early.popleft()
            if self.tape is not None:
                self.tape.heard(early)
            return early
        until = None if seconds is None else time.monotonic() + seconds
        others = () if also is None else (also,)
        while True:
            left = None if until is None else max(0.0, until - time.monotonic())
            # The bus wakes for the supervisor's line too. So a system call that reads the line is needed only where the
            # bus had no message, and now and then where messages of other nodes come without a pause.
            message = self._heard() if self._unheard >= LISTENED else None
            message = message or self.bus.poll(left, self.line.descriptors + others, wanted)
            if message is None:
                message = self._heard()
            else:
                self._unheard += 1
            if message is not None or also is not None or left == 0:
                if message is None:
                    if self._introduced and (seconds or 0.0) >= PATIENCE:
                        self.tell("alive")
                elif self.tape is not None:
                    self.tape.heard(message)
                return message

    def _heard(self) -> Message | None:
        """The supervisor's next message, except acknowledgements of snapshot parts."""
        self._unheard = 0
        while (message := self.line.receive()) is not None and message.tag == "taken":
            self._untaken -= 1
        return message

    def wait_for_end(
        self, attend: Callable[[Message], None] | None = None, buffers: dict[int, FlatArray] | None = None
    ) -> FlatArray | None:
        """Wait for the end of the run; return the resulting model if the supervisor sends it.

        `buffers` receives the buffers of all workers, and `attend` is called with every other message.

        Raises:
            Interrupted: the run failed or was interrupted meanwhile.
        """
        reach("program.ended")
        while True:
            if (message := self.receive(PATIENCE)) is None:  # if the supervisor dies, this process ends: see `die_with`
                continue
            match message.tag if message.source == LAUNCHER else "":
                case "stop":
                    raise stopped(message)
                case "again":
                    raise begin_again(message)
                case "end":
                    return message.array
                case "buffers":
                    if buffers is not None:
                        buffers[int(message.note["rank"])] = message.payload
                case _:
                    if attend is not None:
                        attend(message)

    def wait_for_again(self) -> BeginAgain:
        """Close the connections to the other nodes, and wait until the run continues with other workers.

        Raises:
            Interrupted: the run has ended instead.
        """
        early = deque(message for message in self._early if message.source == LAUNCHER)
        tape, self.tape = self.tape, None  # which holds where this node goes on
        self.leave()
        while True:
            message = early.popleft() if early else self._heard()
            if message is None:
                self.line.wait(PATIENCE)
            elif message.tag == "stop":
                raise stopped(message)
            elif message.tag == AGAIN and not (again := begin_again(message)).waits:
                if tape is not None:
                    tape.heard(message)
                    tape.close()
                return again

    def close(self, linger: float) -> None:
        """Leave the run; queued messages are delivered for up to `linger` seconds."""
        self.leave(linger)
        self.line.close()

    def leave(self, linger: float = 0.0) -> None:
        """Leave the run, which has ended; the link to the supervisor stays open for further calls of `distribute`."""
        self.closed = True
        if self.tape is not None:
            self.tape.close()
        self.bus.close(linger)
        self.memory = self.host_memory = None
        self._early.clear()

    def introduce(
        self,
        strategy: str,
        optimizer: dict[str, str | int | float | bool],
        beside: bool = False,
        repeats: bool = False,
        sizes: tuple[int, ...] = (),
    ) -> None:
        """Say hello to the supervisor; see `Hello` for `beside`, `repeats` and `sizes`.

        Raises:
            Interrupted: the supervisor is gone.
        """
        hello = Hello(
            PROTOCOL,
            self.node_spec.run,
            self.node_spec.address,
            self.bus.address,
            host_here(),
            strategy,
            optimizer,
            self.schema,
            self.largest,
            beside,
            repeats,
            sizes,
        )
        try:
            self.line.introduce(msgspec.msgpack.encode(hello))
        except PeerLost:
            raise _supervisor_silent() from None
        self._introduced = True

    def _meet(self, peers: dict[int, str]) -> None:
        me = self.node_spec.address
        others = {address: endpoint for address, endpoint in peers.items() if address != me}
        self.bus.connect(others)
        early: list[Message] = []
        while not all(map(self.bus.reachable, others)):
            if (message := self.receive(PAUSE)) is not None:
                early.append(self._checked(message))
            for peer in others:
                self._require_connected(peer)
        self._early.extend(early)

    def wait_for(self, tag: str, source: Address = LAUNCHER) -> Message:
        """Wait for a message with the given tag from the supervisor or, if a peer is given, from that peer."""
        early: list[Message] = []
        while True:
            message = self.receive(PATIENCE)
            if message is None:
                self._require_connected(source)
                continue
            self._checked(message)
            if message.source == source and message.tag == tag:
                self._early.extend(early)
                return message
            if message.source != LAUNCHER:
                early.append(message)  # from a peer that began before this node

    def _checked(self, message: Message) -> Message:
        match message.tag if message.source == LAUNCHER else "":
            case "stop":
                raise stopped(message)
            case "again":
                raise begin_again(message)
            case "lost":
                raise PeerLost(message.note.reason)
            case "left":
                left = node_name(int(message.note["address"]))
                raise PeerLost(f"{left} left the run without calling flockstep.join; call it on every worker")
        return message


def send_to_control(node_spec: NodeSpec, failure: Failure) -> None:
    """Report a failure to the supervisor's control socket, if the supervisor still listens."""
    with contextlib.suppress(PeerLost):
        control.say_to_control(node_spec.control, msgspec.msgpack.encode(failure))


def _supervisor_silent() -> SupervisorSilent:
    return SupervisorSilent("the process that supervises this run has stopped answering; see its output")


def failure_of(error: Exception, node_spec: NodeSpec, step: int | None) -> Failure:
    """Return the report of an error for the supervisor. It distinguishes errors of flockstep from errors that user code
    raised in the given step.
    """
    kind, reason = type(error).__name__, str(error)
    if lacks_memory(error):
        limit = ""
        if sys.platform != "win32":
            import resource

            limits = [resource.getrlimit(one)[0] for one in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
            known = [one for one in limits if one != resource.RLIM_INFINITY]
            limit = f" (ulimit allows it {min(known) / 1e6:.0f} MB)" if known else ""
        reason = (
            f"{node_name(node_spec.address)} ran out of memory{limit}; split the model over more workers, for "
            "example with --partition 'pipeline(2)', or in a script with fully_shard and --replica-size 2, use a "
            "smaller batch, or allow the process more memory"
        )
        kind = RunError.__name__
    elif not isinstance(error, FlockstepError):
        where = "" if step is None else f" at step {step}"
        reason = said_of(error, f"{node_name(node_spec.address)}{where}")
        kind = RunError.__name__
    trace = "".join(traceback.format_exception(error))
    return Failure(node_spec.run, node_spec.address, kind, reason[:LONGEST], trace[-LONGEST:])


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error, or the error that caused it, says that memory could not be allocated."""
    if isinstance(error, MemoryError) or (isinstance(error, (RuntimeError, OSError)) and NO_MEMORY.search(str(error))):
        return True
    cause = error.__cause__
    return cause is not None and cause is not error and lacks_memory(cause)


def stopped(message: Message) -> Exception:
    """Return the error that a "stop" message of the supervisor describes."""
    reason = str(message.note["reason"])
    return ConfigurationError(reason) if message.note.get("refused") else Interrupted(reason)


of_fork_server: list[str] = []
"""Folder of the fork server that has forked this process for a launcher, if the launcher alone uses it."""
_folders_of: dict[int, tuple[str, ...]] = {}
"""Process → folders to be removed at its end, by a thread of this process."""


def die_with(pid: int, *directories: str) -> None:
    """End this process as soon as process `pid` of this host has ended, for any reason; with 0, do nothing.

    First, the folders `directories` of the supervisor's sockets are removed, because a supervisor that was killed
    leaves them behind, and `of_fork_server`; the folders of another call with the same `pid` replace them. A signal on
    the parent's death would not work: forked workers are children of a fork server, which outlives a killed supervisor.
    """

    def has_ended(seconds: float | None) -> bool:
        """Wait for the end of the process, for up to `seconds` or without limit; return whether it has ended."""
        try:
            if hasattr(os, "pidfd_open"):
                return bool(select.select([os.pidfd_open(pid)], [], [], seconds)[0])
            while True:
                os.kill(pid, 0)
                if seconds is not None:
                    return False
                time.sleep(PATIENCE)
        except ProcessLookupError:
            return True

    def watch() -> None:
        has_ended(None)
        # One thread for all calls: a second one would end the process while the first one still removes a folder.
        for directory in (*_folders_of[pid], *of_fork_server):
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    watched = pid in _folders_of
    _folders_of[pid] = directories
    if pid and not watched:
        thread = Thread(target=watch, name="flockstep-supervisor-watch", daemon=True)
        thread.start()
        # A process that ends because its supervisor does not answer leaves no half of a folder either.
        atexit.register(lambda: thread.join() if has_ended(0.0) else None)
