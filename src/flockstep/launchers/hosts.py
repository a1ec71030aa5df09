"""The coordinator's side of a run over several hosts: admits the agents of the hosts, and reaches the processes through
the agents.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from flockstep import __version__
from flockstep.errors import ConfigurationError, FlockstepError, PeerLost, ProtocolError, RunError
from flockstep.launchers.children import HOST_LOST, Child
from flockstep.launchers.host_files import AHEAD, PART
from flockstep.launchers.host_messages import (
    Accepted,
    AnyHostMessage,
    Closed,
    Discard,
    Exited,
    Fetch,
    FramesOf,
    Heard,
    HostLinks,
    HostMessage,
    Join,
    Kill,
    Over,
    PartOf,
    Prepared,
    Refused,
    ServerSpec,
    Start,
    Stopped,
    Told,
    frames_of,
    unpacked,
)
from flockstep.launchers.host_settings import differing
from flockstep.launchers.meeting import WAIT_LONGER, Meeting
from flockstep.launchers.wait_monitor import Reminder, on_stderr
from flockstep.links.bus import Backlog
from flockstep.links.connection import LINK_TIMEOUT
from flockstep.links.control import Buffer, Frames
from flockstep.links.wire import MAX_HEADER, PROTOCOL
from flockstep.messages import Address
from flockstep.messages import server as server_address
from flockstep.records.checkpoints import MANIFEST, ArrivingShard, Shard, shard_file
from flockstep.runtime.member import NodeSpec

SHOWN = 16
"""Largest number of missing hosts or ranks that a message lists."""
SAME_VERSION = "install the same version on every host"
NONE_JOINS = "workers of another host join only a run of flockstep train that was started with --max-workers"
"""Default reason why workers of other hosts cannot join the run."""
POLL = 0.05
"""Seconds between two checks of the connections while the coordinator waits for hosts to join."""
SENDING = 0.001
"""Seconds between two attempts to send more over a link that accepts no more bytes."""
UNREAD = 1024
"""Number of unread messages from a host at which the coordinator stops reading from the hosts."""
LINGER = 2.0
"""Seconds for which the coordinator tries to send the hosts the message that the run is over."""


class RemoteChild:
    """A process that a host agent has started."""

    pid = 0

    def __init__(self, host: Host, number: int):
        self._host = host
        self._number = number
        self.code: int | None = HOST_LOST if host.lost else None
        self.reason: str | None = ""

    def exit_code(self) -> int | None:
        """Exit code of the process: None while the process runs, -n if signal n ended the process."""
        return self.code

    def kill(self) -> None:
        """Tell the agent to kill the process."""
        self._host.send(Kill(self._number))


class RemoteFrames(Frames):
    """A connection to a process on another host, through the agent of the host."""

    def __init__(self, host: Host, link: int):
        self._host = host
        self._link = link
        self.arrived: deque[Sequence[Buffer]] = deque()
        self.broke = False

    def send(self, frames: Sequence[Buffer]) -> None:
        self._host.send(*frames_of(self._link, frames))

    def receive(self, most: int, header: int = MAX_HEADER) -> Sequence[Buffer] | None:
        return self.arrived.popleft() if self.arrived else None

    def disconnected(self) -> bool:
        return self.broke

    def close(self) -> None:
        if self._host.frames.pop(self._link, None) is not None:
            self._host.send(Closed(self._link))


@dataclass
class Arriving:
    """A file with a node's state that the coordinator fetches from the node's host."""

    file: ArrivingShard
    done: Callable[[str], None]
    """Function that is called with an empty text once the file has arrived, or with the reason if it cannot arrive."""

    def take(self, message: PartOf, part: memoryview) -> bool:
        """Store the next part of the file; return whether this was the last part."""
        try:
            if message.why:
                raise ProtocolError(message.why)
            self.file.add(part)
            if message.last:
                self.file.finish()
        except (OSError, ProtocolError) as error:
            self.file.drop()
            self.done(error.strerror or str(error) if isinstance(error, OSError) else str(error))
            return True
        if message.last:
            self.done("")
        return message.last


@dataclass
class Host:
    """A host whose agent takes part in the run."""

    join: Join
    peer: Address
    """Address of the agent on the links between hosts."""
    deliver: Callable[[Address, HostMessage, Buffer], None]
    frames: dict[int, RemoteFrames] = field(default_factory=dict)
    children: dict[int, RemoteChild] = field(default_factory=dict)
    waits: bool = False
    """Whether workers of the host are about to join the run in progress."""
    prepared: bool = False
    """Whether the workers that are about to join have built the job."""
    left: bool = False
    """Whether the run continues without the host."""
    arriving: dict[str, Arriving] = field(default_factory=dict)
    """Path in the agent's folder → file that the coordinator is fetching."""
    given: set[str] = field(default_factory=set)
    """Folders of the files that were sent to the host."""
    lost: str = ""
    """Reason for which the agent was lost; empty while the agent is connected."""

    def send(self, message: HostMessage, payload: Buffer = b"") -> None:
        """Queue a message for the agent, unless the agent was lost."""
        if not self.lost:
            self.deliver(self.peer, message, payload)

    @property
    def unread(self) -> int:
        """Number of messages from the host's processes that the coordinator has received but not read."""
        return sum(len(frames.arrived) for frames in self.frames.values())

    @property
    def title(self) -> str:
        """Name of the host in error messages: the number of the node, and the name of the host."""
        return f"node {self.join.node} ({self.join.name})"

    def forget(self, reason: str) -> None:
        """Count the host's processes as lost with the host, and drop the files that have not arrived."""
        self.lost = reason
        for frames in self.frames.values():
            frames.broke = True
        for child in self.children.values():
            child.code = HOST_LOST if child.code is None else child.code
        for one in self.arriving.values():
            one.file.drop()
        self.arriving.clear()


@dataclass(frozen=True)
class ExpectedHosts:
    """The hosts that a coordinator waits for, and what must be equal on all of them."""

    nodes: range
    """The hosts that have to come."""
    placement: Mapping[int, range] | None
    """Node → its ranks; None if the agents say which ranks they have."""
    workers: int
    """Number of workers of the whole run."""
    settings: Mapping[str, str]
    """Settings that must be equal on all hosts."""
    own: Sequence[int] = ()
    """Ranks of the coordinator's host."""
    replica_size: int = 1
    """Number of workers with consecutive ranks that hold one replica of the model."""
    together: int = 1
    """Number of workers with consecutive ranks that must be on one host."""
    resumes: bool = False
    """Whether the run is resumed; then the `settings` name files only, and the checkpoint holds the rest."""


NOBODY = ExpectedHosts(range(1, 1), {}, 0, {})
"""The other hosts of a run on one host."""


class OtherHosts:
    """The other hosts of a run, each with an agent; a run on one host has none, and needs no links."""

    _links: HostLinks
    """The links to the agents, unless all processes of the run are here."""

    def __init__(
        self,
        meeting: Meeting | None = None,
        expected: ExpectedHosts = NOBODY,
        config: str = "",
        heartbeat: float = 0.0,
        link_timeout: float = LINK_TIMEOUT,
        say: Callable[[str], None] = on_stderr,
    ):
        """Listen for the agents of the other hosts.

        Args:
            meeting: address and secret of the run; None for a run on one host.
            expected: the hosts that have to come.
            config: the run's configuration as TOML.
            heartbeat: seconds of silence after which the connection to a host is opened again.
            link_timeout: seconds for which the connection to a host may be away before the host is lost.
            say: function that prints a sentence for the user.

        Raises:
            ConfigurationError: it is not possible to listen at the meeting's address.
        """
        self.here = meeting is None
        """Whether all processes of the run are on this host."""
        self.why_not_join: Callable[[int], str] = lambda workers: NONE_JOINS
        """Function that says why that many workers of another host cannot join now; empty if they can."""
        self.let_leave: Callable[[Collection[int]], bool] = lambda ranks: False
        """Function that lets workers leave the run because their host is stopped, unless the whole run has to end."""
        self._expected, self._config, self._say = expected, config, say
        self._own, self._workers = expected.own, expected.workers
        self._next_node = itertools.count(expected.nodes.stop)
        """Numbers of the hosts that join later."""
        self._newest: list[Host] = []
        """Hosts that have joined with the change of the workers that is going on."""
        self._turned_away = ""
        """The connection that was refused last, with the reason."""
        self._hosts: dict[int, Host] = {}
        self._agents: dict[Address, Host | None] = {}
        """Agent → its host; None if it may not join."""
        self._where: dict[Address, Host] = {}
        """Node whose process is on another host → the host."""
        self._heard: list[tuple[bytes, Frames]] = []
        self._stopped: Stopped | None = None
        self._numbers = itertools.count()
        self._failed: Callable[[], str | None] = lambda: None
        self._closed = False
        if meeting is not None:
            self._meeting = meeting
            self._links = HostLinks(meeting.secret, heartbeat, link_timeout, meeting.listen(heartbeat))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the hosts that the run is over, and how it ended."""
        code = error.exit_code if isinstance(error, FlockstepError) else 1
        self.close("" if error is None else str(error) or type(error).__name__, 0 if error is None else code)

    @property
    def port(self) -> int:
        """Port at which the coordinator listens."""
        return int(self._links.bus.address.rpartition(":")[2])

    @property
    def rejected(self) -> int:
        """Number of connections and hosts that the coordinator has rejected."""
        return 0 if self.here else self._links.bus.traffic.rejected + [*self._agents.values()].count(None)

    @property
    def waiting(self) -> bool:
        """Whether messages have arrived that the coordinator has not read."""
        return bool(self._heard) or any(host.unread for host in self._hosts.values())

    @property
    def joining(self) -> int:
        """Number of workers on other hosts that are about to join the run."""
        return sum(host.join.joining for host in self._waiting_hosts())

    @property
    def prepared(self) -> int:
        """Number of workers on other hosts that are about to join and have built the job."""
        ready = [host for host in self._waiting_hosts() if host.prepared and self._links.bus.connected(host.peer)]
        return sum(host.join.joining for host in ready)

    def _waiting_hosts(self) -> list[Host]:
        return [host for host in self._hosts.values() if host.waits and not host.lost]

    def require_agents(self, failed: Callable[[], str | None]) -> None:
        """End the run if an agent fails before all hosts have joined: `failed` returns the reason, or None."""
        self._failed = failed

    def meet(self) -> None:
        """Wait until the agents of all other hosts have joined.

        Raises:
            ConfigurationError: some hosts did not join in time.
        """
        if self.here:
            return
        until, reminder = time.monotonic() + self._meeting.timeout, Reminder(self._say)
        while missing := self._missing():
            time.sleep(POLL)
            self.pump()
            if (reason := self._failed()) is not None and self._missing():
                raise RunError(reason)
            self.require_running()
            for host in self._hosts.values():
                if host.lost:
                    raise PeerLost(f"{host.title} was lost before the start of the run: {host.lost}")
            if time.monotonic() > until:
                start = f"start flockstep on every host with --coordinator {self._meeting.where}, or {WAIT_LONGER}"
                way = "remove the reason of the refusal, and " if self._turned_away else ""
                raise ConfigurationError(
                    f"{missing} did not join within {self._meeting.timeout:g} s{self._turned_away}; {way}{start}"
                )
            if reminder.remind(f"{missing} at {self._meeting.where}"):
                for host in self._hosts.values():
                    host.send(Told(f"waiting for {missing}"))
        ranks = sorted([*self._where, *self._own])
        if self._expected.placement is None and ranks != list(range(self._workers)):
            raise ConfigurationError(
                f"the ranks of the hosts must be 0 to {self._workers} - 1, each exactly once, got {ranks}; use the "
                "same -n and --nodes on every host"
            )
        if self._expected.replica_size > 1:
            self._place_replicas()

    def _place_replicas(self) -> None:
        """Say where each replica is, whose processes may be on several hosts only if the user has asked for it."""
        ranks = {f"node 0 ({socket.gethostname()})": self._own} if self._own else {}
        for host in self._hosts.values():
            ranks[host.title] = [rank for rank, one in self._where.items() if one is host]
        require_together(ranks, self._expected.together)
        placed = _hosts_of_replicas(ranks, self._expected.replica_size)
        listed = [f"{number} on {' and '.join(hosts)}" for number, hosts in list(placed.items())[:SHOWN]]
        more = ", …" * (len(placed) > SHOWN)
        self._say(f"replicas of {self._expected.replica_size} processes: {', '.join(listed)}{more}")

    def _missing(self) -> str:
        """Hosts that have not come, or ranks where the agents say which they have; empty if there are none."""
        nodes, placement = self._expected.nodes, self._expected.placement
        if placement is None:
            ranks = [rank for rank in range(self._workers) if rank not in self._where and rank not in self._own]
            return _listed("rank", ranks, self._workers)
        absent = [node for node in nodes if node not in self._hosts]
        waited = _listed("rank", [rank for node in absent for rank in placement[node]], self._workers)
        return _listed("node", absent, nodes.stop) + f" ({waited})" * bool(waited)

    def require_running(self) -> None:
        """Raise an error if another host has requested the end of the run.

        Raises:
            KeyboardInterrupt: the user of another host stops the run, as Ctrl-C on this host does; raised once.
            RunError: another host cannot do its part.
        """
        if self._stopped is None:
            return
        if self._stopped.failed:
            raise RunError(self._stopped.reason)
        reason, self._stopped = self._stopped.reason, None  # the run takes its last checkpoint
        raise KeyboardInterrupt(reason)

    def place_server(self, address: Address, index: int, beside: Sequence[int]) -> bool:
        """Choose the host of a server: if the strategy places the server beside a worker, the host of this worker;
        otherwise, each of the hosts with workers in turn. Return whether the server runs on another host.
        """
        if beside:
            host = self._where.get(beside[index % len(beside)])
        else:
            here = bool(self._own)
            others = [host for _, host in sorted(self._hosts.items()) if not (host.left or host.lost or host.waits)]
            turn = index % (len(others) + here) - here if others else -1
            host = None if turn < 0 else others[turn]
        if host is not None:
            self._where[address] = host
        return host is not None

    def has(self, address: Address) -> bool:
        """Return whether the process of a node is on another host."""
        return address in self._where

    def start(self, spec: NodeSpec, server: ServerSpec | None = None, config: str = "") -> Child | None:
        """Start a worker or a server through the agent of its host; return None if the worker's process already exists.

        `config` is the run's configuration as TOML, if the configuration has changed since the run began.
        """
        host, number = self._where[spec.address], next(self._numbers)
        whole = server is not None and server.group is None
        node = server_address(server.index) if whole and server is not None else spec.address
        host.send(Start(number, self._with_state(host, spec, node), server, config))
        if server is None and self._expected.placement is None and not host.join.watches:
            return None
        child = host.children[number] = RemoteChild(host, number)
        return child

    def again(self, spec: NodeSpec) -> NodeSpec:
        """Return the node specification with which a worker's process continues when the workers of the run change."""
        if (host := self._where.get(spec.address)) is None:
            return spec
        return replace(self._with_state(host, spec, spec.address), control="", directory="")

    def _with_state(self, host: Host, spec: NodeSpec, node: Address) -> NodeSpec:
        """Send the state from which a node continues to its host; return the node specification with the place of the
        state there.
        """
        if not spec.checkpoint:
            return spec
        folder, there = Path(spec.checkpoint), f"from-{spec.run}"
        for name in (*((MANIFEST,) if there not in host.given else ()), shard_file(node)):
            with (folder / name).open("rb") as opened:
                last = False
                while not last and not host.lost:
                    part = opened.read(PART)
                    last = len(part) < PART
                    host.send(PartOf(f"{there}/{name}", last), part)
                    while self._links.bus.backlog(host.peer) > AHEAD and not host.lost:
                        time.sleep(SENDING)
                        self.pump()
        host.given.add(there)
        return replace(spec, checkpoint=there)

    def begin(self) -> None:
        """Tell the hosts that all nodes are ready, so that they may remove the files from which the nodes have read
        their states.
        """
        for host in self._hosts.values():
            for folder in host.given:
                host.send(Discard(folder))
            host.given.clear()

    def fetch(self, address: Address, shard: Shard, folder: Path, done: Callable[[str], None]) -> None:
        """Fetch the file with a node's state from the node's host to the folder of a checkpoint.

        `done` is called once the file is complete, or with the reason if it cannot be fetched.
        """
        host, path = self._where[address], f"of-{shard.file}/{folder.name}/{shard.file}"
        try:
            host.arriving[path] = Arriving(ArrivingShard(folder, shard), done)
        except OSError as error:
            done(error.strerror or str(error))
            return
        host.send(Fetch(path))

    def rearrange(self, former: Mapping[int, int], workers: int, config: str) -> None:
        """Prepare the hosts for a run with other workers, some of which join from waiting hosts.

        Args:
            former: new rank → former rank of each worker that continues.
            workers: new number of workers.
            config: the run's configuration as TOML.
        """
        where = {new: self._where[old] for new, old in former.items() if old in self._where}
        own = [new for new, old in former.items() if old in self._own]
        free = [rank for rank in range(workers) if rank not in former]
        for host in self._waiting_hosts():
            if host.prepared and len(free) >= host.join.joining:
                where.update(dict.fromkeys(free[: host.join.joining], host))
                del free[: host.join.joining]
                host.waits = False
                self._newest.append(host)
        for host in self._hosts.values():
            if not (host.waits or host.lost or host.left) and host not in where.values():
                host.left = True
                host.send(Over("", 0))
        self._where, self._own, self._workers, self._config = where, (*own, *free), workers, config

    def confirm(self, text: str) -> None:
        """Tell the hosts that have joined that their workers now take part."""
        for host in self._newest:
            host.send(Told(text))
        self._newest.clear()

    def refuse_joiners(self, text: str) -> None:
        """Refuse the hosts that wait to join the run."""
        for host in (*self._waiting_hosts(), *self._newest):
            host.send(Refused(text))
            host.left, host.waits = True, False
        self._newest.clear()

    def descriptors(self) -> tuple[int, ...]:
        """Return the file descriptors that are readable when `pump` has something to do."""
        return () if self.here else (self._links.bus.fileno(),)

    def heard(self) -> Iterator[tuple[bytes, Frames]]:
        """Return what processes of other hosts have said first since the last call, with the connection of each."""
        found, self._heard = self._heard, []
        yield from found

    def pump(self) -> None:
        """Handle the messages that have arrived from hosts, and send the queued messages."""
        if self.here:
            return
        lost = self._links.bus.broken(0.0)  # before the messages are received: what an agent said before its end counts
        while all(host.unread < UNREAD for host in self._hosts.values()):
            if (arrived := self._links.receive()) is None:
                break
            self._take(*arrived)
        else:
            lost = set()
        for host in self._hosts.values():
            if host.left and not host.lost and not self._links.bus.connected(host.peer):
                self._lose(host, "the run continues without this host", told=False)
            elif host.peer in lost and not host.lost:
                self._lose(host, self._links.bus.obstacle(host.peer) or "its agent has closed the connection")
        while self._links.refusals:
            self._say_turned_away(*self._links.refusals.popleft())
        while self._links.resumptions:
            peer, away, why = self._links.resumptions.popleft()
            if (known := self._agents.get(peer)) is not None:
                self._say(f"{known.title} reconnected after {away:.1f} s ({why})")

    def abandon(self) -> None:
        """Count a host as lost if its processes have not ended although they were told to end."""
        for host in self._hosts.values():
            if not host.lost and any(child.code is None for child in host.children.values()):
                self._lose(host, "its processes did not end in time")

    def close(self, reason: str, code: int) -> None:
        """Tell the hosts that the run is over, and why it failed, so that they end their remaining processes.

        Closing again has no effect.
        """
        if self.here or self._closed:
            return
        self._closed = True
        for host in self._hosts.values():
            host.send(Over(reason, code))
        self._links.bus.close(LINGER)
        for host in self._hosts.values():
            host.forget(host.lost or "the run is over")

    def _send(self, peer: Address, message: HostMessage, payload: Buffer) -> None:
        """Queue a message for an agent; while too much is queued, handle what arrives."""
        with contextlib.suppress(PeerLost):  # `pump` sees it
            while True:
                try:
                    self._links.send(peer, message, payload)
                    return
                except Backlog:
                    if (host := self._agents.get(peer)) is not None and host.lost:
                        return
                    time.sleep(SENDING)
                    self.pump()

    def _take(self, peer: Address, data: memoryview) -> None:
        """Handle a message of an agent, which may be one that has not joined yet."""
        host = self._agents.get(peer)
        if host is None and peer in self._agents:
            return  # it was refused, and will close the connection
        try:
            message, payload = unpacked(data)
            if host is None:
                self._admit(peer, message)
            elif not host.lost:
                self._handle(host, message, payload)
        except ProtocolError as error:
            if host is not None:
                self._lose(host, str(error))
            else:
                version = f"the other end does not use the protocol of flockstep {__version__}; {SAME_VERSION}"
                self._refuse(peer, version)

    def _admit(self, peer: Address, message: AnyHostMessage) -> None:
        """Let a host in that has said which one it is."""
        reason = self._objection(message) if isinstance(message, Join) else "the first message does not name a host"
        if reason is not None or not isinstance(message, Join):
            self._refuse(peer, reason or "")
            return
        if joins := message.joining > 0:
            message = msgspec.structs.replace(message, node=next(self._next_node))
            self._say(f"node {message.node} ({message.name}) is about to join with {message.joining} workers")
        host = self._hosts[message.node] = self._agents[peer] = Host(message, peer, self._send, waits=joins)
        self._where.update(dict.fromkeys(() if joins else self._ranks_of(message), host))
        host.send(Accepted(self._config, message.node, dict(self._expected.settings) if joins else {}))

    def _refuse(self, peer: Address, reason: str) -> None:
        """Tell an agent why its host may not join; the agent closes the connection."""
        self._agents[peer] = None
        self._say_turned_away("an agent", reason)
        self._send(peer, Refused(reason), b"")

    def _say_turned_away(self, other: str, reason: str) -> None:
        self._turned_away = f" (refused {other}: {reason})"
        self._say(self._turned_away.strip()[1:-1])

    def _ranks_of(self, join: Join) -> Sequence[int]:
        return join.ranks if self._expected.placement is None else self._expected.placement[join.node]

    def _objection(self, join: Join) -> str | None:
        """Why a host may not join; None if it may."""
        said, nodes = f"node {join.node} ({join.name})", self._expected.nodes
        if join.protocol != PROTOCOL or join.version != __version__:
            return (
                f"{said} has flockstep {join.version} (protocol {join.protocol}), the coordinator has "
                f"{__version__} (protocol {PROTOCOL}); {SAME_VERSION}"
            )
        if join.joining:
            return self.why_not_join(join.joining) or None
        if join.nodes != nodes.stop or (join.workers != self._workers and not self._expected.resumes):
            return (
                f"{said} was started for {join.nodes} hosts and {join.workers} workers, the coordinator for "
                f"{nodes.stop} hosts and {self._workers} workers; give every host the same --nodes and -n"
            )
        if (known := self._hosts.get(join.node)) is not None and (known.left or known.lost):
            return (
                f"{said} was part of this run and is not any more; a run of flockstep train with --max-workers takes "
                "the workers of this host with flockstep join; a run that has ended continues with flockstep resume on "
                "every host"
            )
        if known is not None:
            return f"{said} has joined already; give every host a different --node-rank"
        if join.node not in nodes:
            return f"the node rank of {said} must be one of {nodes.start} to {nodes.stop - 1}; correct --node-rank"
        if taken := [rank for rank in self._ranks_of(join) if rank in self._where or rank in self._own]:
            return (
                f"{said} has the ranks {taken}, which another host has already; give every host the same -n and --nodes"
            )
        ours, theirs = self._expected.settings, join.settings
        if self._expected.resumes:
            theirs = {name: value for name, value in theirs.items() if name in ours}
        wrong = differing(ours, theirs)
        return wrong and f"{said} differs from the coordinator: {wrong}; start every host with the same command"

    def _handle(self, host: Host, message: AnyHostMessage, payload: memoryview) -> None:
        match message:
            case Heard():
                if message.link in host.frames:
                    raise ProtocolError(f"an agent names the connection {message.link} twice")
                host.frames[message.link] = RemoteFrames(host, message.link)
                self._heard.append((message.words, host.frames[message.link]))
            case FramesOf():
                if (frames := host.frames.get(message.link)) is not None:
                    frames.arrived.append((message.header, payload) if message.array else (message.header,))
            case Closed():
                if (frames := host.frames.get(message.link)) is not None:
                    frames.broke = True
            case PartOf():
                arriving = host.arriving.get(message.path)
                if arriving is not None and arriving.take(message, payload):
                    del host.arriving[message.path]
            case Exited():
                if (child := host.children.get(message.number)) is not None:
                    child.code, child.reason = message.code, message.reason
            case Prepared():
                host.prepared = True
            case Stopped():
                self._stop(host, message)
            case _:
                raise ProtocolError(f"an agent sent {type(message).__name__}")

    def _stop(self, host: Host, message: Stopped) -> None:
        """The user of a host, or its system, stops it: it does not join, its workers leave, or the run ends."""
        ranks = [rank for rank, one in self._where.items() if one is host and rank >= 0]
        if host.waits:
            host.left, host.waits = True, False
            host.send(Over(message.reason, 1))
            self._say(f"{host.title} does not join: {message.reason}")
        elif not host.left and (message.failed or not self.let_leave(ranks)):
            self._stopped = self._stopped or message

    def _lose(self, host: Host, reason: str, told: bool = True) -> None:
        """A host is gone, and with it all its processes; the user is `told` unless nobody waits for the host."""
        host.forget(reason)
        self._links.bus.disconnect(host.peer)
        if told:
            self._say(f"{host.title} is lost: {reason}")


def require_together(ranks: Mapping[str, Sequence[int]], together: int) -> None:
    """Check that each replica of `together` consecutive ranks is on one host; `ranks`: host → its ranks.

    Raises:
        ConfigurationError: a replica is on several hosts.
    """
    for number, hosts in _hosts_of_replicas(ranks, together).items():
        if len(hosts) > 1:
            raise ConfigurationError(
                f"the processes of one replica must run on one host, but replica {number} of {together} processes has "
                f"processes on {' and '.join(hosts)}; give each host a multiple of {together} consecutive ranks, or "
                "ask for replicas over hosts with flockstep launch --replica-over-hosts, or in a script that another "
                f"launcher starts with flockstep.replica(size={together}, over_hosts=True)"
            )


def _hosts_of_replicas(ranks: Mapping[str, Sequence[int]], size: int) -> dict[int, list[str]]:
    """Number of each replica of `size` consecutive ranks → its hosts; `ranks`: host → its ranks."""
    found = dict[int, dict[str, None]]()
    for host, own in ranks.items():
        for rank in own:
            found.setdefault(rank // size, {})[host] = None
    return {number: list(hosts) for number, hosts in sorted(found.items())}


def _listed(what: str, numbers: Sequence[int], of: int) -> str:
    """The numbers in words, as in "nodes 1, 2 of 3"; empty without numbers."""
    shown = ", ".join(map(str, numbers[:SHOWN])) + ", …" * (len(numbers) > SHOWN)
    return f"{what}{'s' * (len(numbers) > 1)} {shown} of {of}" if numbers else ""
