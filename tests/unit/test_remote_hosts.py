"""Who is let in at the coordinator's port, and what strangers cost it: real sockets in one process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import flockstep.transports.admission as admission
from flockstep import __version__
from flockstep.drivers.member import NodeSpec
from flockstep.errors import ConfigurationError, PeerLost, RunError
from flockstep.launchers.children import HOST_LOST
from flockstep.launchers.gathering import settings_of
from flockstep.launchers.host_agent import HostAgent
from flockstep.launchers.host_messages import Accepted, Heard, Join, Over, Refused, Stopped, decoded, encoded
from flockstep.launchers.hosts import ACCEPTED, RemoteHosts
from flockstep.launchers.joining_host import _JoiningHost
from flockstep.launchers.meeting import Meeting, address_towards, meeting_at, read_secret
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.out_of_memory import OutOfMemoryDetector
from flockstep.messages import server
from flockstep.records.config import RunConfig
from flockstep.strategies.base import Strategy
from flockstep.transports.admission import UNPROVED
from flockstep.transports.host_channel import MAX_HEADER, HostChannel
from flockstep.transports.wire import PROTOCOL
from support.ports import free_port
from support.processes import PATIENCE, wait_until

SECRET = b"a secret of these tests alone!!!"
nothing: Any = lambda *given: None
JOIN = Join(PROTOCOL, __version__, 1, 2, 4, (2, 3), "there", {"seed": "0"})


@pytest.fixture
def hosts() -> Iterator[RemoteHosts]:
    meeting = Meeting("127.0.0.1", free_port(), SECRET, timeout=PATIENCE)
    said: list[str] = []
    found = RemoteHosts(meeting, range(1, 2), {1: range(2, 4)}, 4, {"seed": "0"}, "", 5.0, said.append)
    found.said, found.meeting = said, meeting  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        found.close("", 0)


def knock(hosts: RemoteHosts, secret: bytes = SECRET) -> HostChannel:
    """A connection of an agent, whose handshake is complete."""
    channel = HostChannel(socket.create_connection(("127.0.0.1", port(hosts))), secret, True, 5.0)

    def done() -> bool:
        channel.flush()
        hosts.pump()
        channel.receive()
        return channel.established

    try:
        wait_until(done, PATIENCE, "the handshake")
    except PeerLost:
        channel.close()
        raise
    return channel


def port(hosts: RemoteHosts) -> int:
    meeting: Meeting = hosts.meeting  # type: ignore[attr-defined]
    return meeting.port


def answer(hosts: RemoteHosts, channel: HostChannel, join: Join) -> object:
    """What the coordinator answers to an agent."""
    channel.send(encoded(join))
    found: list[object] = []

    def heard() -> bool:
        channel.flush()
        hosts.pump()
        found.extend(decoded(header) for header, _ in channel.receive())
        return bool(found)

    wait_until(heard, PATIENCE, "an answer")
    return found[0]


def test_a_host_is_let_in_once(hosts: RemoteHosts) -> None:
    first, second = knock(hosts), knock(hosts)
    assert isinstance(answer(hosts, first, JOIN), Accepted)
    assert hosts.has(2)
    assert not hosts.has(1)
    refused = answer(hosts, second, JOIN)
    assert isinstance(refused, Refused)
    assert refused.reason == "node 1 (there) has joined already; give every host a different --node-rank"
    hosts.meet()
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.0"}, "install the same version on every host"),
        ({"protocol": PROTOCOL + 1}, "install the same version on every host"),
        ({"node": 0}, "must be one of 1 to 1"),
        ({"node": 2}, "must be one of 1 to 1"),
        ({"workers": 5}, "was started for 2 hosts and 5 workers, the coordinator for 2 hosts and 4"),
        ({"settings": {"seed": "1"}}, "seed is 1 on that host and 0 at the coordinator"),
        ({"settings": {}}, "seed is the default on that host"),
        ({"settings": {"seed": "0", "lr": "1"}}, "lr is 1 on that host and the default at the coordinator"),
        ({"settings": {"seed": "0", "module": "m.py"}}, "module is m.py on that host and missing at the coordinator"),
    ],
)
def test_a_host_that_differs_is_refused(hosts: RemoteHosts, change: dict[str, object], reason: str) -> None:
    channel = knock(hosts)
    refused = answer(hosts, channel, msgspec.structs.replace(JOIN, **change))
    assert isinstance(refused, Refused)
    assert reason in refused.reason
    assert reason in hosts.said[-1]  # type: ignore[attr-defined]
    assert not hosts.has(2)
    channel.close()


def test_a_host_without_the_secret_is_turned_away_and_named_once(hosts: RemoteHosts) -> None:
    for _ in range(2):
        rejected = hosts.rejected
        with pytest.raises(PeerLost, match="secret"):
            knock(hosts, b"another secret, as long as ours")
        assert hosts.rejected > rejected
    assert hosts.said == ["refused 127.0.0.1: the other end does not know the secret of this run"]  # type: ignore[attr-defined]


def test_a_thousand_idle_strangers_hold_few_handles_and_keep_no_host_out(hosts: RemoteHosts) -> None:
    handles, memory = len(os.listdir("/dev/fd")), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # noqa: PTH208
    idle = []
    for _ in range(1000):
        idle.append(socket.create_connection(("127.0.0.1", port(hosts))))
        hosts.pump()
    held = len(os.listdir("/dev/fd")) - handles - len(idle)  # noqa: PTH208
    assert held <= UNPROVED + 1
    assert hosts.rejected >= 1000 - UNPROVED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10  # KiB
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    channel.close()
    for sock in idle:
        sock.close()


def test_idle_strangers_do_not_close_the_connection_of_a_host_that_proves_the_secret(
    hosts: RemoteHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them connect between two turns of the coordinator, after the host's hello; some are closed before the host
    has answered.
    """
    monkeypatch.setattr(admission, "UNPROVED", ACCEPTED)
    channel = HostChannel(socket.create_connection(("127.0.0.1", port(hosts))), SECRET, True, 5.0)
    channel.flush()
    idle = [socket.create_connection(("127.0.0.1", port(hosts))) for _ in range(2 * ACCEPTED)]
    wait_until(lambda: hosts.pump() or hosts.rejected >= ACCEPTED, PATIENCE, "strangers are turned away")  # type: ignore[func-returns-value]
    wait_until(lambda: hosts.pump() or channel.receive() or channel.established, PATIENCE, "the proof")  # type: ignore[func-returns-value]
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    channel.close()
    for sock in idle:
        sock.close()


def test_a_flood_of_connections_does_not_keep_the_coordinator_in_one_turn(hosts: RemoteHosts) -> None:
    """A program connects anew whenever the coordinator accepts a connection, so that one always waits."""
    listener, flood = hosts._listener, [socket.create_connection(("127.0.0.1", port(hosts)))]

    class Flooded:
        """The coordinator's listener, with a further connection after each one that is accepted."""

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

        def accept(self) -> Any:
            assert len(flood) < 10 * ACCEPTED, "the coordinator does nothing else"
            flood.append(socket.create_connection(("127.0.0.1", port(hosts))))
            return listener.accept()

    hosts._listener = Flooded()  # type: ignore[assignment]
    hosts.pump()
    assert len(flood) == 1 + ACCEPTED
    for sock in flood:
        sock.close()


def test_an_agent_connects_again_if_its_connection_ends_before_the_proof(hosts: RemoteHosts) -> None:
    """A coordinator that turns away connections at random is no coordinator without the secret, which is told at
    once.
    """
    meeting: Meeting = hosts.meeting  # type: ignore[attr-defined]
    agent, made = agent_with(EndedProcess(0), SentMessages()), list[socket.socket]()

    class Once:
        """The meeting, whose first connection the other end has closed."""

        def __getattr__(self, name: str) -> Any:
            return getattr(meeting, name)

        def connect(self, seconds: float) -> socket.socket:
            sock = meeting.connect(seconds)
            made.append(sock)
            if len(made) == 1:
                sock.shutdown(socket.SHUT_RDWR)
            return sock

        def wait(self, channel: HostChannel, seconds: float) -> None:
            hosts.pump()

    agent._meeting, agent._heartbeat, agent._say = Once(), 5.0, nothing  # type: ignore[assignment]
    channel = agent._reach()
    assert channel.established
    assert len(made) == 2
    channel.close()
    meeting = dataclasses.replace(meeting, secret=b"another secret, as long as ours")
    with pytest.raises(ConfigurationError, match=r"did not admit this host.*give every host the same secret"):
        agent._reach()
    assert len(made) == 3


def test_an_agent_whose_connection_breaks_before_its_join_arrives_joins_over_another(hosts: RemoteHosts) -> None:
    """Its proof has arrived; its first message has not."""
    meeting: Meeting = hosts.meeting  # type: ignore[attr-defined]
    agent = agent_with(EndedProcess(0), SentMessages())

    class Pumped:
        """The meeting, whose coordinator proceeds whenever the agent waits."""

        def __getattr__(self, name: str) -> Any:
            return getattr(meeting, name)

        def wait(self, channel: HostChannel, seconds: float) -> None:
            hosts.pump()

    agent._meeting, agent._heartbeat, agent._say = Pumped(), 5.0, nothing  # type: ignore[assignment]
    agent._join = msgspec.structs.replace(JOIN, session="the key of its session")
    agent._channel = agent._reach()
    agent._channel._socket.shutdown(socket.SHUT_RDWR)
    assert agent._admitted().node == 1
    assert hosts.has(2)
    agent._channel.close()


@pytest.mark.parametrize(("left", "lost"), [(True, ""), (False, "it was killed")])
def test_a_host_that_was_lost_is_told_how_to_come_back(hosts: RemoteHosts, left: bool, lost: str) -> None:
    first, second = knock(hosts), knock(hosts)
    assert isinstance(answer(hosts, first, JOIN), Accepted)
    hosts._hosts[1].left, hosts._hosts[1].lost = left, lost
    refused = answer(hosts, second, JOIN)
    first.close()
    second.close()
    assert isinstance(refused, Refused)
    assert "node 1 (there) was part of this run and is not any more; a run of flockstep train with" in refused.reason
    assert "flockstep resume" in refused.reason


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(100_000), os.urandom(4096)])
def test_garbage_is_turned_away_before_it_is_stored(hosts: RemoteHosts, data: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port(hosts))) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
        wait_until(lambda: hosts.pump() or hosts.rejected, PATIENCE, "it is turned away")  # type: ignore[func-returns-value]
    assert hosts.said == []  # type: ignore[attr-defined]  # no host of ours: only counted


def test_an_agent_of_another_version_is_refused_in_a_sentence(hosts: RemoteHosts) -> None:
    """Its first message has a field more."""
    channel = knock(hosts)
    fields = {**msgspec.structs.asdict(JOIN), "type": "Join", "newer": 1}
    channel.send(msgspec.msgpack.encode(fields))
    found: list[object] = []

    def heard() -> bool:
        channel.flush()
        hosts.pump()
        found.extend(decoded(header) for header, _ in channel.receive())
        return bool(found)

    wait_until(heard, PATIENCE, "an answer")
    assert isinstance(found[0], Refused)
    assert "install the same version on every host" in found[0].reason
    channel.close()


def test_a_payload_before_the_join_is_not_stored(hosts: RemoteHosts) -> None:
    channel = knock(hosts)
    channel.send(b"x", [bytes(1 << 20)])
    with contextlib.suppress(PeerLost):
        channel.flush()
    wait_until(lambda: hosts.pump() or hosts.rejected, PATIENCE, "it is turned away")  # type: ignore[func-returns-value]
    assert "announced a message of 1 and [1048576] bytes" in hosts.said[-1]  # type: ignore[attr-defined]
    channel.close()


def test_who_stops_while_the_run_ends_is_heard_later(hosts: RemoteHosts) -> None:
    """`pump` raises nothing, so that what has arrived with it is handled; `require_running` raises it."""
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    channel.send(encoded(Stopped("stopped there")))
    channel.send(encoded(Heard(0)), [b"and this"])
    heard: list[object] = []
    assert not hosts.waiting

    def both() -> bool:
        channel.flush()
        hosts.pump()
        if not hosts.waiting:
            return False
        heard.extend(hosts.heard())
        return bool(heard)

    wait_until(both, PATIENCE, "both messages")
    with pytest.raises(KeyboardInterrupt, match="stopped there"):
        hosts.require_running()
    hosts.require_running()  # while the run takes its last checkpoint
    channel.close()


def test_servers_run_beside_a_worker_or_on_the_hosts_in_turn(hosts: RemoteHosts) -> None:
    """Workers 2 and 3 are on the other host; the coordinator's host counts in the turns if it has workers."""
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    beside = Strategy.parse("hierarchical(group=2)").beside(4)
    assert beside == (0, 0, 2)
    assert [hosts.place_server(server(index), index, beside) for index in range(3)] == [False, False, True]
    assert [hosts.has(server(index)) for index in range(3)] == [False, False, True]
    assert [hosts.place_server(server(index), index, ()) for index in (3, 4)] == [True, True]
    hosts._own = (0, 1)
    assert [hosts.place_server(server(index), index, ()) for index in (5, 6)] == [True, False]
    channel.close()


def test_processes_that_nobody_ends_are_lost_with_their_host(hosts: RemoteHosts) -> None:
    """A host whose beats go on, and that does nothing else; also where the run is closed without waiting."""
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    child = hosts.start(NodeSpec("run", 2, "", "", "tcp", 5.0, "", 4, 0))
    assert child is not None
    assert child.exit_code() is None
    hosts.abandon()
    assert child.exit_code() == HOST_LOST
    channel.close()


def test_what_a_host_announces_is_bounded(hosts: RemoteHosts) -> None:
    channel = knock(hosts)
    channel.send(bytes(MAX_HEADER + 1))
    with contextlib.suppress(PeerLost):
        channel.flush()
    wait_until(lambda: hosts.pump() or hosts.rejected, PATIENCE, "it is turned away")  # type: ignore[func-returns-value]
    assert "announced a message of" in hosts.said[-1]  # type: ignore[attr-defined]
    channel.close()


def test_a_recorded_session_cannot_be_replayed(hosts: RemoteHosts) -> None:
    """Everything that an agent has sent, handshake included, is sent again by a stranger."""
    sent = bytearray()

    class Tapped(socket.socket):
        def send(self, data: object, flags: int = 0) -> int:  # type: ignore[override]
            count = super().send(data, flags)  # type: ignore[arg-type]
            sent.extend(memoryview(data)[:count])  # type: ignore[arg-type]
            return count

    raw = Tapped(socket.AF_INET, socket.SOCK_STREAM)
    raw.connect(("127.0.0.1", port(hosts)))
    channel = HostChannel(raw, SECRET, True, 5.0)

    def done() -> bool:
        channel.flush()
        hosts.pump()
        channel.receive()
        return channel.established

    wait_until(done, PATIENCE, "the handshake")
    channel.send(encoded(JOIN))
    channel.flush()
    channel.close()
    wait_until(lambda: hosts.pump() or hosts.has(2), PATIENCE, "the agent joins")  # type: ignore[func-returns-value]
    rejected = hosts.rejected
    assert len(sent) > 100
    with socket.create_connection(("127.0.0.1", port(hosts))) as stranger:
        stranger.sendall(sent)  # a join that was understood would be refused by another sentence
        wait_until(lambda: hosts.pump() or hosts.rejected > rejected, PATIENCE, "it is turned away")  # type: ignore[func-returns-value]
    assert hosts.said[-1] == "refused 127.0.0.1: the other end does not know the secret of this run"  # type: ignore[attr-defined]


def test_a_channel_carries_messages_whole_and_in_order() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = HostChannel(socket.create_connection(listener.getsockname()), SECRET, True, 5.0)
        other = HostChannel(listener.accept()[0], SECRET, False, 5.0)
    large = os.urandom(3_000_000)
    arrived: list[tuple[bytes, list[memoryview]]] = []

    def done() -> bool:
        one.flush()
        arrived.extend(other.receive())
        other.flush()
        one.receive()
        return len(arrived) == 3

    other.keep_alive()  # it was let in: before, payloads are refused
    one.send(b"first", [b"x", large])
    one.send(b"second", [b""])
    one.send(b"third")
    wait_until(done, PATIENCE, "three messages")
    assert [(header, [bytes(part) for part in parts]) for header, parts in arrived] == [
        (b"first", [b"x", large]),
        (b"second", [b""]),
        (b"third", []),
    ]
    one.close()
    with pytest.raises(PeerLost, match="closed"):
        other.receive()
    other.close()


def test_what_was_queued_is_sent_although_its_process_is_busy() -> None:
    """Nobody flushes: the thread of the beats does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = HostChannel(socket.create_connection(listener.getsockname()), SECRET, True, 0.4)
        other = HostChannel(listener.accept()[0], SECRET, False, 0.4)

    def established() -> bool:
        one.flush()
        other.receive()
        other.flush()
        one.receive()
        return one.established and other.established

    wait_until(established, PATIENCE, "the handshake")
    one.keep_alive()
    one.send(b"queued")
    arrived: list[bytes] = []
    wait_until(lambda: arrived.extend(header for header, _ in other.receive()) or arrived, PATIENCE, "it arrives")  # type: ignore[func-returns-value]
    assert arrived == [b"queued"]
    one.close()
    other.close()


class SentMessages:
    """A channel that keeps what an agent sends."""

    backlog, blocked, silent, connected = 0, False, False, True

    def __init__(self) -> None:
        self.names: list[str] = []
        self.messages: list[Any] = []

    def fileno(self) -> int:
        return 0

    def send(self, header: bytes, payloads: object = ()) -> None:
        message = decoded(header)
        self.names.append(type(message).__name__)
        self.messages.append(message)

    def flush(self) -> None:
        pass

    def receive(self) -> list[object]:
        return []


class EndedProcess:
    """A process that has sent many messages and then ended: its connection, its exit code, and its control socket."""

    pid = 0

    def __init__(self, messages: int):
        self.left = messages

    def receive(self, most: int) -> list[bytes] | None:
        self.left -= 1
        return [b"header"] if self.left >= 0 else None

    def disconnected(self) -> bool:
        return True

    def exit_code(self) -> int:
        return -signal.SIGKILL

    def kill(self) -> None:
        pass

    def close(self) -> None:
        pass

    def wait(self, *given: object) -> bool:
        return True

    def heard(self) -> list[bytes]:
        return []


def agent_with(ended: EndedProcess, channel: SentMessages) -> Any:
    agent: Any = HostAgent(Meeting("127.0.0.1", 1, SECRET), JOIN, nothing, nothing, 5.0)
    agent._channel, agent._control, agent._frames, agent._children = channel, ended, {0: ended}, {0: ended}
    return agent


def test_a_host_says_that_its_process_was_killed_for_lack_of_memory(hosts: RemoteHosts) -> None:
    sent = SentMessages()
    agent = agent_with(EndedProcess(0), sent)
    agent._memory = OutOfMemoryDetector(iter((0, 1)).__next__)
    agent._turn(0.0)
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    child = hosts.start(NodeSpec("run", 2, "", "", "tcp", 5.0, "", 4, 0))
    assert child is not None
    channel.send(encoded(sent.messages[-1]))
    wait_until(lambda: channel.flush() or hosts.pump() or child.exit_code() is not None, PATIENCE, "its end")  # type: ignore[func-returns-value]
    assert child.exit_code() == -signal.SIGKILL
    assert child.reason is not None
    assert child.reason.startswith(", probably by the kernel for lack of memory")
    channel.close()


def test_a_host_that_has_come_says_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.launchers.wait_monitor.PERIOD", 0.0)
    meeting, placement = Meeting("127.0.0.1", 0, SECRET, 0.5), {1: range(2, 4), 2: range(4, 5)}
    with RemoteHosts(meeting, range(1, 3), placement, 5, {}, "", 5.0, nothing) as hosts:
        hosts.meeting = Meeting("127.0.0.1", hosts._listener.getsockname()[1], SECRET)  # type: ignore[attr-defined]
        channel = knock(hosts)
        assert isinstance(
            answer(hosts, channel, msgspec.structs.replace(JOIN, nodes=3, workers=5, settings={})), Accepted
        )
        with pytest.raises(PeerLost, match="secret"):
            knock(hosts, b"another secret, as long as ours")
        told = r"node 2 of 3 \(rank 4 of 5\) did not join within 0\.5 s \(refused 127\.0\.0\.1: the other end does not"
        with pytest.raises(ConfigurationError, match=rf"{told} know the secret.*\); remove the reason of the refusal"):
            hosts.meet()
        said: list[str] = []
        agent: Any = HostAgent(Meeting("127.0.0.1", 1, SECRET), JOIN, nothing, nothing, 5.0, say=said.append)
        for header, payloads in channel.receive():
            agent._handle(decoded(header), payloads)
        assert said[0] == "waiting for node 2 of 3 (rank 4 of 5)"
        channel.close()


def test_a_host_says_that_the_coordinator_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something listens there, and is silent."""
    monkeypatch.setattr("flockstep.launchers.wait_monitor.PERIOD", 0.0)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = Meeting("127.0.0.1", silent.getsockname()[1], SECRET, 0.5)
        agent = HostAgent(meeting, JOIN, nothing, nothing, 5.0, say=said.append)
        with pytest.raises(ConfigurationError, match=r"no answer within 0\.5 s"):
            agent.run()
    where = f"waiting for the coordinator at {meeting.where}"
    assert said[0] == f"{where} (connected, but the coordinator has not answered yet)"


def test_hosts_are_told_how_the_run_has_ended(hosts: RemoteHosts) -> None:
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    with pytest.raises(RunError, match="evaluation"), hosts:
        raise RunError("the evaluation failed")
    assert [decoded(header) for header, _ in channel.receive()] == [Over("the evaluation failed", 1)]
    channel.close()


def test_the_last_messages_of_a_process_come_before_its_end() -> None:
    ended, channel = EndedProcess(100), SentMessages()
    agent = agent_with(ended, channel)
    for _ in range(10):
        agent._turn(0.0)
    assert channel.names[:100] == ["FramesOf"] * 100
    assert channel.names[100:102] == ["Broken", "Exited"]
    assert channel.names.count("Exited") == 1


def test_silence_is_noticed_and_beats_break_it() -> None:
    clock = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = HostChannel(socket.create_connection(listener.getsockname()), SECRET, True, 0.4)
        other = HostChannel(listener.accept()[0], SECRET, False, 5.0, lambda: clock[0])

    def established() -> bool:
        one.flush()
        other.receive()
        other.flush()
        one.receive()
        return one.established and other.established

    wait_until(established, PATIENCE, "the handshake")
    clock[0] = 5.1
    assert other.silent
    one.keep_alive()
    wait_until(lambda: other.receive() or not other.silent, PATIENCE, "a beat")
    one.close()
    other.close()


@pytest.mark.parametrize(
    ("text", "host", "at"),
    [
        ("10.0.0.1:29400", "10.0.0.1", 29400),
        ("[fd00::1]:1", "fd00::1", 1),
        ("node0.example:65535", "node0.example", 65535),
    ],
)
def test_where_the_coordinator_listens(text: str, host: str, at: int) -> None:
    meeting = meeting_at(text, SECRET)
    assert (meeting.host, meeting.port, meeting.where) == (host, at, text)
    assert SECRET.decode() not in repr(meeting)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1", "10.0.0.1:", ":29400", "host:0", "host:65536", "fd00::1:29400", "host:x"]
)
def test_what_is_no_address_of_a_coordinator(text: str) -> None:
    with pytest.raises(ConfigurationError, match="must be a host and a port"):
        meeting_at(text, SECRET)


def test_a_name_that_does_not_resolve_and_a_port_in_use() -> None:
    with pytest.raises(ConfigurationError, match=r"'nowhere.invalid' does not resolve"):
        meeting_at("nowhere.invalid:29400", SECRET).listen()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"cannot listen at {where}: Address already in use"):
            meeting_at(where, SECRET).listen()
    with pytest.raises(ConfigurationError, match="Cannot assign requested address"):
        meeting_at("192.0.2.1:29400", SECRET).listen()


def test_a_secret_is_long_and_nobody_else_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOCKSTEP_SECRET", raising=False)
    with pytest.raises(ConfigurationError, match="needs a secret, got none"):
        read_secret(None)
    monkeypatch.setenv("FLOCKSTEP_SECRET", "short")
    with pytest.raises(ConfigurationError, match="at least 16 characters, got 5"):
        read_secret(None)
    monkeypatch.setenv("FLOCKSTEP_SECRET", "0123456789abcdef")
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o644)
    with pytest.raises(ConfigurationError, match="other users can read the secret"):
        read_secret(file)
    file.chmod(0o600)
    assert read_secret(file) == read_secret(None)
    with pytest.raises(ConfigurationError, match="cannot read the secret"):
        read_secret(tmp_path / "missing")


def test_a_host_that_joins_must_have_the_files_of_the_run(tmp_path: Path) -> None:
    job, component, changed = (tmp_path / name for name in ("job.py", "component.py", "changed/component.py"))
    changed.parent.mkdir()
    for file in (job, component, changed):
        file.write_text("# " * (file == changed))
    config = RunConfig(kind="train", job=str(job), strategy="gossip", workers=2, imports=(str(component),))
    accepted = Accepted(config.to_toml(), 2, settings_of(config))
    _JoiningHost(str(job), (str(component),)).invite(0, accepted)
    for named, imports, wrong in [
        (None, (str(changed),), r"import 0 is component.py \(SHA-256 \w+\) on that host and component.py \(SHA-256"),
        (None, (str(component), str(changed)), "import 1 is component.py .+ and missing at the coordinator"),
        ("softmax", (), "job is softmax on that host and job.py"),
    ]:
        with pytest.raises(ConfigurationError, match=f"this host cannot join: {wrong}"):
            _JoiningHost(named, imports).invite(0, accepted)


def test_the_coordinator_hears_that_a_host_that_joins_has_other_files(hosts: RemoteHosts) -> None:
    hosts.why_not_join = lambda workers: ""
    hosts._config = RunConfig(kind="train", job="softmax", strategy="gossip", workers=2).to_toml()
    channel, sent = knock(hosts), SentMessages()
    accepted = answer(hosts, channel, msgspec.structs.replace(JOIN, node=0, ranks=(), settings={}, joining=1))
    assert isinstance(accepted, Accepted)
    assert accepted.settings == {"seed": "0"}
    assert hosts.joining == 1

    def refuse(accepted: Accepted) -> Newcomers:
        raise ConfigurationError("other files")

    agent = agent_with(EndedProcess(0), sent)
    agent._invite = refuse
    with pytest.raises(ConfigurationError, match="other files"):
        agent._follow(accepted)
    channel.send(encoded(sent.messages[-1]))
    wait_until(lambda: channel.flush() or hosts.pump() or not hosts.joining, PATIENCE, "it is turned back")  # type: ignore[func-returns-value]
    assert hosts.said[-1].endswith("does not join: other files")  # type: ignore[attr-defined]
    channel.close()


def test_a_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    with pytest.raises(
        ConfigurationError, match=r"host name 'nodeX' does not resolve on this machine: .*; correct the"
    ):
        address_towards("nodeX")
