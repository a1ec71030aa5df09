"""The agent of a host: starts the processes of a run on its host, and connects them to the coordinator.

The agent opens one connection to the coordinator. Its processes send messages to the agent over Unix sockets, as they
would to a supervisor on their own host; the agent forwards the messages without decoding them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from flockstep.drivers.member import NodeSpec
from flockstep.errors import ConfigurationError, FlockstepError, Interrupted, PeerLost, ProtocolError, RunError
from flockstep.launchers.children import Child, kill_all, reap
from flockstep.launchers.host_files import AHEAD, HostFiles
from flockstep.launchers.host_messages import (
    Accepted,
    AnyHostMessage,
    Broken,
    Close,
    Discard,
    Exited,
    Fetch,
    FramesOf,
    Heard,
    HostMessage,
    Join,
    Kill,
    Over,
    Prepared,
    Refused,
    Resume,
    Resumed,
    ServerSpec,
    Start,
    Stopped,
    Store,
    Told,
    Waiting,
    decoded,
    encoded,
)
from flockstep.launchers.meeting import WAIT_LONGER, Meeting
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.out_of_memory import OutOfMemoryDetector
from flockstep.launchers.signals import undisturbed
from flockstep.launchers.wait_monitor import Reminder, on_stderr
from flockstep.messages import node_name
from flockstep.records.config import RunConfig
from flockstep.records.scratch import scratch
from flockstep.transports.base import Transport
from flockstep.transports.host_channel import MAX_PAYLOAD, HostChannel
from flockstep.transports.kinds import Tcp
from flockstep.transports.links import Control, LocalFrames
from flockstep.transports.sealed import LinkForged
from flockstep.transports.session import LINK_TIMEOUT, new_key

RETRY = 0.25
"""Seconds between two attempts to reach the coordinator."""
CONNECTING = 5.0
"""Longest time in seconds of one attempt to connect to the coordinator at the start of the run."""
AGAIN = 1.0
"""Longest time in seconds of one attempt to reconnect to the coordinator; during the attempt, nothing is forwarded."""
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
        start_server: Callable[[NodeSpec, ServerSpec], Child],
        heartbeat: float,
        imports: tuple[str, ...] = (),
        say: Callable[[str], None] = on_stderr,
        link_timeout: float = LINK_TIMEOUT,
        newcomers: Callable[[Accepted], Newcomers] = lambda accepted: Newcomers(),
    ):
        """`start_worker` returns the started process, or None if something else has started it; `imports`: files with
        custom components, as they are called on this host; `link_timeout`: seconds for which the connection to the
        coordinator may be away; `newcomers`: starts the processes of workers that join a run that is going on.
        """
        self._link_timeout = link_timeout
        self._invite, self._newcomers = newcomers, Newcomers()
        self._prepared = not join.joining
        """Whether the coordinator knows that the workers that join have built the job."""
        self._next_attempt = 0.0
        """Time of the next attempt to connect again, in seconds of the monotonic clock."""
        self._meeting = meeting
        self._join = msgspec.structs.replace(join, session=new_key())
        self._start_worker = start_worker
        self._start_server = start_server
        self._heartbeat = heartbeat
        self._imports = imports
        self._say = say
        self._frames: dict[int, LocalFrames] = {}
        self._links = itertools.count()
        self._children: dict[int, Child] = {}
        self._reported: set[int] = set()
        self._memory = OutOfMemoryDetector()
        self._over: Over | None = None
        self._early: list[tuple[AnyHostMessage, list[memoryview]]] = []
        """Messages that arrived together with the coordinator's answer."""
        self._channel: HostChannel
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
        self._channel = self._reach()
        with contextlib.ExitStack() as stack:
            stack.callback(self._channel.close)
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
                for message, payloads in self._early:
                    self._handle(message, payloads)
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
        self._heartbeat = self._channel.heartbeat = config.heartbeat or self._heartbeat
        try:
            self._newcomers = self._invite(accepted)
        except FlockstepError as error:
            self._send(Prepared(str(error)))
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

    def _reach(self) -> HostChannel:
        """Connect to the coordinator, as soon as it listens, and prove the secret.

        A connection may end before the proof because other programs have opened many to the same port.
        """
        until, reminder = time.monotonic() + self._meeting.timeout, Reminder(self._say)
        while True:
            try:
                sock = self._meeting.connect(min(CONNECTING, max(RETRY, until - time.monotonic())))
                channel = HostChannel(sock, self._meeting.secret, True, self._heartbeat)
                return self._proved(channel, until)
            except PeerLost as error:
                if isinstance(error.__cause__, LinkForged):
                    raise ConfigurationError(
                        f"the coordinator at {self._meeting.where} did not admit this host: {error}; give every host "
                        "the same secret, and check that a flockstep coordinator listens at this address"
                    ) from None
                why = f"the handshake failed: {error}"
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > until:
                raise ConfigurationError(
                    f"no coordinator answered at {self._meeting.where} within {self._meeting.timeout:g} s ({why}); "
                    f"start node 0, check the address, the firewall and the route, or {WAIT_LONGER}"
                )
            reminder.remind(f"the coordinator at {self._meeting.where} ({why})")
            time.sleep(RETRY)

    def _proved(self, channel: HostChannel, until: float) -> HostChannel:
        """Wait for the end of the handshake.

        Raises:
            PeerLost: the connection ended before both ends had proved that they know the secret.
        """
        reminder = Reminder(self._say)
        try:
            while not channel.established:
                reminder.remind(
                    f"the coordinator at {self._meeting.where} (connected, but the coordinator has not answered yet)"
                )
                channel.flush()
                self._meeting.wait(channel, RETRY)
                channel.receive()
                if time.monotonic() > until:
                    raise PeerLost(f"no answer within {self._meeting.timeout:g} s")
        except PeerLost:
            channel.close()
            raise
        channel.keep_alive()
        return channel

    def _admitted(self) -> Accepted:
        """Introduce this host, and wait for the coordinator's answer."""
        self._send(self._join)
        reminder = Reminder(self._say)
        while True:
            reminder.remind(f"the coordinator at {self._meeting.where} to admit this host")
            if self._channel.connected:
                self._meeting.wait(self._channel, RETRY)
            else:
                time.sleep(RETRY)
                self._connect_again(self._meeting.timeout, "--timeout")
            arrived = self._received()
            for at, (message, _) in enumerate(arrived):
                if isinstance(message, Refused | Over):
                    raise ConfigurationError(
                        f"the coordinator at {self._meeting.where} refused this host: {message.reason}"
                    )
                if isinstance(message, Accepted):
                    self._early = arrived[at + 1 :]
                    return message

    def _send(self, message: HostMessage, *payloads: bytes | bytearray | memoryview) -> None:
        self._channel.send(encoded(message), payloads)
        with contextlib.suppress(PeerLost):  # seen when the next message is received
            self._channel.flush()

    def _received(self) -> list[tuple[AnyHostMessage, list[memoryview]]]:
        """Messages of the coordinator.

        Raises:
            RunError: the coordinator is gone.
        """
        channel = self._channel
        try:
            found = [(decoded(header), payloads) for header, payloads in channel.receive()]
            with contextlib.suppress(PeerLost):  # what has arrived counts; the next call raises
                channel.flush()
        except PeerLost as error:
            channel.interrupt(str(error), True)
            return []
        except (ProtocolError, ValueError) as error:
            raise self._lost(str(error)) from None
        if channel.silent:
            channel.interrupt(f"the coordinator has not answered for {self._heartbeat:g} s", False)
        return found

    def _lost(self, why: str) -> RunError:
        return RunError(f"the connection to the coordinator at {self._meeting.where} is lost: {why}")

    def _connect_again(self, limit: float, name: str) -> None:
        """Try to connect to the coordinator again, and go on with the session; `name` is the name of the limit.

        Raises:
            RunError: the coordinator is gone, or has given this host up, or was away for longer than `limit` seconds.
        """
        channel, now = self._channel, time.monotonic()
        if now < self._next_attempt:
            return
        try:
            sock = self._meeting.connect(AGAIN)
            fresh = HostChannel(sock, self._meeting.secret, True, self._heartbeat)
            try:
                away = channel.resume(fresh, self._answered(fresh))
            except (PeerLost, ProtocolError, ValueError):
                fresh.close()
                raise
        except ConnectionRefusedError:
            raise self._lost(f"{channel.why}, and nothing listens there any more") from None
        except (OSError, PeerLost) as error:
            if now - channel.down > limit:
                raise self._lost(
                    f"{channel.why}, and the link was down for {now - channel.down:.1f} s, longer than the {name} "
                    f"of {limit:g} s ({error})"
                ) from None
            self._next_attempt = time.monotonic() + RETRY
        except (ProtocolError, ValueError) as error:
            raise self._lost(str(error)) from None
        else:
            self._say(f"connected to the coordinator at {self._meeting.where} again after {away:.1f} s ({channel.why})")

    def _answered(self, fresh: HostChannel) -> int:
        """Name this host's session on a fresh connection; return the number of bytes that the coordinator has.

        Raises:
            PeerLost: the connection broke, or the coordinator does not answer in time.
            ProtocolError: the coordinator has given this host up.
        """
        fresh.send(encoded(Resume(self._join.node, self._join.session, self._channel.received)))
        until = time.monotonic() + self._heartbeat
        while time.monotonic() < until:
            fresh.flush()
            self._meeting.wait(fresh, RETRY)
            for header, _ in fresh.receive(1):
                answer = decoded(header)
                if isinstance(answer, Resumed):
                    return answer.received
                raise ProtocolError(answer.reason if isinstance(answer, Refused | Over) else "another answer")
        raise PeerLost(f"no answer within {self._heartbeat:g} s")

    def _turn(self, seconds: float) -> None:
        """Forward what has arrived, within that time."""
        full = self._channel.backlog > BACKLOG
        if not self._channel.connected:
            self._connect_again(self._link_timeout, "link timeout")
        connected = self._channel.connected
        also = {self._channel.fileno(): self._channel.blocked} if connected else {}
        sends = connected and self._files.waiting and self._channel.backlog <= AHEAD
        self._control.wait(() if full else self._frames.values(), 0.0 if sends else seconds, also)
        with undisturbed():  # half a message would look like a broken protocol
            self._exchange(full)

    def _exchange(self, full: bool) -> None:
        """Handle and forward what has arrived; nothing of the processes if the queue for the coordinator is `full`."""
        Control.flush(self._frames.values())
        for message, payloads in self._received():
            self._handle(message, payloads)
        for data, connection in self._control.heard():
            link = next(self._links)
            self._frames[link] = connection
            self._send(Heard(link), data)
        self._report_newcomers()
        ended = {number: child.exit_code() for number, child in self._children.items()}
        broken = [link for link, frames in self._frames.items() if frames.disconnected()]
        drained = not full
        for link, frames in list(self._frames.items()) if drained else ():
            drained &= self._forward(link, frames)
        if not drained:
            return  # what a process has sent comes before its end
        self._send_files()
        for link in broken:
            self._send(Broken(link))
            self._frames.pop(link).close()
        for number, code in ended.items():
            if code is not None and number not in self._reported:
                self._reported.add(number)
                self._send(Exited(number, code, self._memory.explain(code)))

    def _report_newcomers(self) -> None:
        """Tell the coordinator once all workers that join have built the job.

        Raises:
            RunError: one of them has failed.
        """
        if self._prepared:
            return
        try:
            self._prepared = self._newcomers.ready()
        except RunError as error:
            self._send(Prepared(str(error)))
            raise
        if self._prepared:
            self._send(Prepared())

    def _send_files(self) -> None:
        """Send parts of the files that the coordinator fetches."""
        if self._channel.connected and self._channel.backlog <= AHEAD:
            for message, part in self._files.parts():
                self._send(message, part)
                if self._channel.backlog > AHEAD:
                    return

    def _forward(self, link: int, frames: LocalFrames) -> bool:
        """Forward messages of a process, at most so many; return whether none is left."""
        with contextlib.suppress(ProtocolError):  # the connection is closed then
            for _ in range(MESSAGES):
                if (parts := frames.receive(MAX_PAYLOAD)) is None:
                    return True
                self._send(FramesOf(link), *parts)
            return False
        return True

    def _handle(self, message: AnyHostMessage, payloads: list[memoryview]) -> None:
        match message:
            case Waiting():
                self._say(f"waiting for {message.text}")
            case Start():
                self._try(lambda: self._start(message), f"start {node_name(message.spec.address)}")
            case Told():
                self._say(message.text)
            case Refused():
                raise ConfigurationError(message.reason)
            case Store() | Discard() | Fetch():
                self._try(lambda: self._files.handle(message, payloads), f"store {message.path}")
            case FramesOf():
                if (frames := self._frames.get(message.link)) is not None:
                    frames.send(payloads)
            case Close():
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
            transport=str(on_host(Transport.parse(message.spec.transport), self._meeting.own or self._channel.own)),
            supervisor=os.getpid(),
            imports=self._imports,
        )
        if message.server is not None:
            server = msgspec.structs.replace(message.server, imports=self._imports)
            self._children[message.number] = self._start_server(spec, server)
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
