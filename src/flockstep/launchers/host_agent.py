"""The agent of a host: starts the processes of a run on its host, and connects them to the coordinator.

The agent opens one connection to the coordinator. Its processes send messages to the agent over Unix sockets, as they
would to a supervisor on their own host; the agent forwards the messages without decoding them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from flockstep.errors import ConfigurationError, FlockstepError, Interrupted, PeerLost, ProtocolError, RunError
from flockstep.launchers.children import Child, kill_all, reap
from flockstep.launchers.entry import start_server
from flockstep.launchers.host_files import AHEAD, HostFiles
from flockstep.launchers.host_messages import (
    MAX_MESSAGE,
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
    Start,
    Stopped,
    Told,
    frames_of,
    unpacked,
)
from flockstep.launchers.meeting import WAIT_LONGER, Meeting, address_towards
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.out_of_memory import OutOfMemoryDetector
from flockstep.launchers.signals import undisturbed
from flockstep.launchers.wait_monitor import Reminder, on_stderr
from flockstep.links.connection import LINK_TIMEOUT
from flockstep.links.control import Buffer, Control, LocalFrames
from flockstep.links.kinds import Tcp, Transport
from flockstep.messages import LAUNCHER as COORDINATOR
from flockstep.messages import node_name
from flockstep.records.config import RunConfig
from flockstep.records.scratch import scratch
from flockstep.runtime.member import NodeSpec

RETRY = 0.25
"""Seconds between two attempts to reach the coordinator."""
CONNECTING = 5.0
"""Longest time in seconds of an attempt to connect to one of several addresses of the coordinator."""
LINGER = 2.0
"""Seconds for which the agent tries to send what is queued for the coordinator before the agent ends."""
POLL = 0.05
"""Seconds between two checks of the processes."""
LEAVING = 15.0
"""Maximum number of seconds that the agent of a host that leaves waits until the run continues without the host or has
ended.
"""
GRACE = 3.0
"""Seconds for which the agent waits for processes to end by themselves, before it kills them."""
BACKLOG = 1 << 24
"""Number of bytes queued for the coordinator at which the agent stops reading from its processes."""
MESSAGES = 32
"""Maximum number of messages of one process that are forwarded before those of the next process."""


class HostAgent:
    """The agent of a host: starts the host's processes of a run, and forwards messages between them and the
    coordinator.
    """

    def __init__(
        self,
        meeting: Meeting,
        join: Join,
        start_worker: Callable[[NodeSpec, Accepted], Child | None],
        heartbeat: float,
        link_timeout: float = LINK_TIMEOUT,
        imports: tuple[str, ...] = (),
        newcomers: Callable[[Accepted], Newcomers] | None = None,
        say: Callable[[str], None] = on_stderr,
    ):
        """Prepare an agent.

        Args:
            meeting: address and secret of the run.
            join: the host's first message.
            start_worker: function that starts a worker; None as its result means that something else has started it.
            heartbeat: seconds of silence after which the connection to the coordinator is opened again.
            link_timeout: seconds for which the connection to the coordinator may be away.
            imports: files with custom components, as they are called on this host.
            newcomers: function that starts the processes of workers that join a run that is going on.
            say: function that prints a sentence for the user.
        """
        self._meeting, self._join, self._say = meeting, join, say
        self._heartbeat, self._link_timeout = heartbeat, link_timeout
        self._start_worker, self._imports, self._invite = start_worker, imports, newcomers
        self._newcomers = Newcomers()
        self._prepared = not join.joining
        """Whether the coordinator knows that the workers that join have built the job."""
        self._frames: dict[int, LocalFrames] = {}
        self._numbers = itertools.count()
        self._children: dict[int, Child] = {}
        self._reported: set[int] = set()
        self._memory = OutOfMemoryDetector()
        self._over: Over | None = None
        self._links: HostLinks
        self._control: Control
        self._accepted: Accepted
        self._directory = Path()
        self._files = HostFiles(self._directory)

    def run(self) -> None:
        """Join the run, and carry out the coordinator's requests until the run ends.

        Raises:
            ConfigurationError: the coordinator refused, or cannot be reached in time.
            RunError: the run failed, or the coordinator is gone.
        """
        with contextlib.ExitStack() as stack:
            self._links = self._reach()
            stack.callback(self._links.bus.close, LINGER)
            self._accepted = self._admitted()
            if self._join.joining:
                self._follow(self._accepted)
            self._directory = stack.enter_context(scratch())
            self._files = HostFiles(self._directory)
            stack.callback(self._files.close)
            self._control = Control(f"ipc://{self._directory / 'control'}", self._heartbeat)
            stack.callback(self._control.close)
            stack.callback(self._end)
            try:
                while self._over is None:
                    self._turn(POLL)
            except KeyboardInterrupt as stop:
                self._leave(str(stop) or "interrupted")
            if self._over is None or self._over.reason:
                over = self._over or Over("the run was stopped by the user", 1)
                kind = ConfigurationError if over.code == ConfigurationError.exit_code else RunError
                raise kind(f"the run has ended: {over.reason}")
            reap(list(self._children.values()), None)

    def _follow(self, accepted: Accepted) -> None:
        """Use the settings of the run that this host joins, and start the processes of its workers."""
        config = RunConfig.from_toml(accepted.config, "the coordinator's configuration")
        self._join = msgspec.structs.replace(self._join, node=accepted.node)
        self._link_timeout = LINK_TIMEOUT if config.link_timeout is None else config.link_timeout
        self._links.bus.set_limits(config.heartbeat or self._heartbeat, self._link_timeout)
        self._heartbeat = config.heartbeat or self._heartbeat
        try:
            self._newcomers = Newcomers() if self._invite is None else self._invite(accepted)
        except FlockstepError as error:
            self._send(Stopped(str(error), failed=True))
            raise

    def _leave(self, reason: str) -> None:
        """Tell the coordinator that this host's user stops the run, and wait for its end, or until the run continues
        without this host.
        """
        self._send(Stopped(f"{reason} on node {self._join.node} ({self._join.name})"))
        until = time.monotonic() + LEAVING
        while self._over is None and time.monotonic() < until:
            self._turn(POLL)
        if self._over is not None and not self._over.reason:
            return
        raise Interrupted(f"{reason}; the record is on the coordinator's host")

    def _reach(self) -> HostLinks:
        """Connect to the coordinator, as soon as it listens, and prove the secret.

        A connection may end before the proof because other programs have opened many to the same port.

        Raises:
            ConfigurationError: the coordinator does not know the secret, or does not answer in time.
        """
        until, reminder, why = time.monotonic() + self._meeting.timeout, Reminder(self._say), "no attempt has ended"
        while True:
            addresses = self._meeting.addresses()
            for address in addresses:
                links = HostLinks(self._meeting.secret, self._heartbeat, self._link_timeout)
                links.bus.connect({COORDINATOR: address}, self._meeting.own)
                end = min(until, time.monotonic() + CONNECTING) if len(addresses) > 1 else until
                while not links.bus.broken(0.0) and (now := time.monotonic()) < end:
                    if links.bus.reachable(COORDINATOR):
                        return links
                    why = links.bus.obstacle(COORDINATOR) or why
                    reminder.remind(f"the coordinator at {self._meeting.where} ({why})")
                    select.select([links.bus], [], [], min(RETRY, end - now))
                    links.receive()
                forged, why = links.bus.traffic.rejected, links.bus.obstacle(COORDINATOR) or why
                links.bus.close(0.0)
                if forged:
                    raise ConfigurationError(
                        f"the coordinator at {self._meeting.where} did not admit this host: {why}; give every host "
                        "the same secret, and check that a flockstep coordinator listens at this address"
                    )
            if time.monotonic() > until:
                raise ConfigurationError(
                    f"no coordinator answered at {self._meeting.where} within {self._meeting.timeout:g} s ({why}); "
                    f"start node 0, check the address, the firewall and the route, or {WAIT_LONGER}"
                )
            time.sleep(RETRY)

    def _admitted(self) -> Accepted:
        """Introduce this host, and wait for the coordinator's answer."""
        self._send(self._join)
        reminder = Reminder(self._say)
        while True:
            reminder.remind(f"the coordinator at {self._meeting.where} to admit this host")
            select.select([self._links.bus], [], [], RETRY)
            for message, _ in self._received():
                if isinstance(message, Refused | Over):
                    raise ConfigurationError(
                        f"the coordinator at {self._meeting.where} refused this host: {message.reason}"
                    )
                if isinstance(message, Accepted):
                    return message  # what has arrived after it is received in the next turn

    def _send(self, message: HostMessage, payload: Buffer = b"") -> None:
        with contextlib.suppress(PeerLost):  # seen when the next message is received
            self._links.send(COORDINATOR, message, payload)

    def _received(self) -> Iterator[tuple[AnyHostMessage, memoryview]]:
        """The coordinator's messages that have arrived.

        Raises:
            RunError: the coordinator is gone.
        """
        lost = self._links.bus.broken(0.0)  # before the messages are received: what it said before its end counts
        while self._links.resumptions:
            _, away, why = self._links.resumptions.popleft()
            self._say(f"connected to the coordinator at {self._meeting.where} again after {away:.1f} s ({why})")
        try:
            while (arrived := self._links.receive()) is not None:
                yield unpacked(arrived[1])
        except ProtocolError as error:
            raise self._lost(str(error)) from None
        if lost and self._over is None:
            raise self._lost(self._links.bus.obstacle(COORDINATOR) or "the coordinator has closed it")

    def _lost(self, why: str) -> RunError:
        return RunError(f"the connection to the coordinator at {self._meeting.where} is lost: {why}")

    def _turn(self, seconds: float) -> None:
        """Forward what has arrived, within that time."""
        backlog = self._links.bus.backlog(COORDINATOR)
        full, sends = backlog > BACKLOG, self._files.waiting and backlog <= AHEAD
        sources = () if full else self._frames.values()
        self._control.wait(sources, 0.0 if sends else seconds, (self._links.bus.fileno(),))
        with undisturbed():  # half a message would look like a broken protocol
            self._exchange(full)

    def _exchange(self, full: bool) -> None:
        """Handle and forward what has arrived; nothing of the processes if the queue for the coordinator is `full`."""
        Control.flush(self._frames.values())
        for message, payload in self._received():
            self._handle(message, payload)
        for words, connection in self._control.heard():
            link = next(self._numbers)
            self._frames[link] = connection
            self._send(Heard(link, words))
        if not self._prepared:
            try:
                self._prepared = self._newcomers.ready()
            except RunError as error:
                self._send(Stopped(str(error), failed=True))
                raise
            if self._prepared:
                self._send(Prepared())
        ended = {number: child.exit_code() for number, child in self._children.items()}
        broken = [link for link, frames in self._frames.items() if frames.disconnected()]
        drained = not full
        for link, frames in list(self._frames.items()) if drained else ():
            drained &= self._forward(link, frames)
        if not drained:
            return  # what a process has sent comes before its end
        for part in self._files.parts() if self._links.bus.backlog(COORDINATOR) <= AHEAD else ():
            self._send(*part)
            if self._links.bus.backlog(COORDINATOR) > AHEAD:
                break
        for link in broken:
            self._send(Closed(link))
            self._frames.pop(link).close()
        for number, code in ended.items():
            if code is not None and number not in self._reported:
                self._reported.add(number)
                self._send(Exited(number, code, self._memory.explain(code)))

    def _forward(self, link: int, frames: LocalFrames) -> bool:
        """Forward messages of a process, at most so many; return whether none is left."""
        with contextlib.suppress(ProtocolError):  # the connection is closed then
            for _ in range(MESSAGES):
                if self._links.bus.backlog(COORDINATOR) > BACKLOG:
                    return False
                if (parts := frames.receive(MAX_MESSAGE)) is None:
                    return True
                self._send(*frames_of(link, parts))
            return False
        return True

    def _handle(self, message: AnyHostMessage, payload: memoryview) -> None:
        match message:
            case Start():
                self._try(lambda: self._start(message), f"start {node_name(message.spec.address)}")
            case Told():
                self._say(message.text)
            case Refused():
                raise ConfigurationError(message.reason)
            case PartOf():
                self._try(lambda: self._files.store(message, payload), f"store {message.path}")
            case Discard():
                self._try(lambda: self._files.discard(message.path), f"remove {message.path}")
            case Fetch():
                self._files.fetch(message.path)
            case FramesOf():
                if (frames := self._frames.get(message.link)) is not None:
                    frames.send([message.header, payload] if message.array else [message.header])
            case Closed():
                if (frames := self._frames.pop(message.link, None)) is not None:
                    frames.close()
            case Kill():
                if (child := self._children.get(message.number)) is not None:
                    child.kill()
            case Over():
                self._over = message

    def _try(self, do: Callable[[], None], what: str) -> None:
        try:
            do()
        except (FlockstepError, OSError) as error:
            where = f"node {self._join.node} ({self._join.name})"
            self._send(Stopped(f"{where} cannot {what}: {error}", failed=True))

    def _start(self, message: Start) -> None:
        """Start a process whose sockets are those of this host."""
        spec = dataclasses.replace(
            message.spec,
            control=self._control.address,
            directory=str(self._directory),
            transport=str(
                on_host(
                    Transport.parse(message.spec.transport), self._meeting.own or address_towards(self._meeting.host)
                )
            ),
            supervisor=os.getpid(),
            imports=self._imports,
            tapes=Path(message.spec.tapes).name,
        )
        if message.server is not None:
            server = msgspec.structs.replace(message.server, imports=self._imports)
            self._children[message.number] = start_server(spec, server)
            return
        accepted = msgspec.structs.replace(self._accepted, config=message.config or self._accepted.config)
        if (child := self._start_worker(spec, accepted)) is not None:
            self._children[message.number] = child

    def _end(self) -> None:
        """End what is left of the processes."""
        self._newcomers.end()
        for frames in self._frames.values():
            frames.close()
        if self._over is None or self._over.reason:
            with contextlib.suppress(KeyboardInterrupt):
                until = time.monotonic() + GRACE
                while time.monotonic() < until and any(one.exit_code() is None for one in self._children.values()):
                    time.sleep(POLL)
            kill_all(list(self._children.values()))
        reap(list(self._children.values()), GRACE)


def on_host(transport: Transport, host: str) -> Transport:
    """Return the transport of a node on the host with the given address; with an interface, each host uses the address
    of its own interface.

    Raises:
        ConfigurationError: the transport does not reach other hosts.
    """
    if not isinstance(transport, Tcp):
        raise ConfigurationError(f"a run over several hosts needs the transport tcp, got {transport}; leave it out")
    return transport if transport.interface else dataclasses.replace(transport, host=host)
