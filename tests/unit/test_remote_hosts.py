"""Who is let in at the coordinator's port, and what strangers cost it: real sockets in one process."""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flockstep.errors import ConfigurationError, PeerLost, RunError
from flockstep.launchers import host_messages
from flockstep.launchers.children import HOST_LOST
from flockstep.launchers.gathering import settings_of
from flockstep.launchers.host_agent import HostAgent
from flockstep.launchers.host_messages import (
    MAX_MESSAGE,
    Accepted,
    AnyHostMessage,
    Heard,
    HostLinks,
    HostMessage,
    Join,
    Over,
    Refused,
    Stopped,
    unpacked,
)
from flockstep.launchers.hosts import ExpectedHosts, OtherHosts
from flockstep.launchers.joining_host import _JoiningHost
from flockstep.launchers.meeting import Meeting, address_towards, meeting_at, read_secret
from flockstep.launchers.newcomers import Newcomers
from flockstep.launchers.out_of_memory import OutOfMemoryDetector
from flockstep.launchers.tasks import TaskGathering
from flockstep.links.wire import PROTOCOL
from flockstep.messages import LAUNCHER, server
from flockstep.records.config import RunConfig
from flockstep.runtime.member import NodeSpec
from flockstep.strategies.base import Strategy
from support.damage import resident
from support.ports import free_port
from support.processes import PATIENCE, wait_until

SECRET = b"a secret of these tests alone!!!"
nothing: Any = lambda *given: None
JOIN = Join(1, 2, 4, (2, 3), {"seed": "0"}, name="there")


@pytest.fixture
def hosts() -> Iterator[OtherHosts]:
    meeting = Meeting("127.0.0.1", free_port(), SECRET, timeout=PATIENCE)
    said: list[str] = []
    expected = ExpectedHosts(range(1, 2), {1: range(2, 4)}, 4, {"seed": "0"})
    found = OtherHosts(meeting, expected, "", 5.0, say=said.append)
    found.said, found.meeting, found.agents = said, meeting, []  # type: ignore[attr-defined]
    try:
        yield found
    finally:
        for links in found.agents:  # type: ignore[attr-defined]
            links.bus.close(0.0)
        found.close("", 0)


def knock(hosts: OtherHosts, secret: bytes = SECRET) -> HostLinks:
    """The links of an agent that has proved the secret."""
    links = HostLinks(secret, 5.0, 60.0)
    links.bus.connect({LAUNCHER: f"tcp://127.0.0.1:{hosts.port}"})

    def done() -> bool:
        hosts.pump()
        links.receive()
        return links.bus.reachable(LAUNCHER) or bool(links.bus.broken(0.0))

    wait_until(done, PATIENCE, "the handshake")
    hosts.agents.append(links)  # type: ignore[attr-defined]
    if links.bus.broken(0.0):
        raise PeerLost(links.bus.obstacle(LAUNCHER))
    return links


def heard(links: HostLinks) -> AnyHostMessage | None:
    """The next message that an agent has received."""
    arrived = links.receive()
    return None if arrived is None else unpacked(arrived[1])[0]


def answer(hosts: OtherHosts, links: HostLinks, join: HostMessage) -> object:
    """What the coordinator answers to an agent."""
    links.send(LAUNCHER, join)
    return answered(hosts, links)


def answered(hosts: OtherHosts, links: HostLinks) -> object:
    found: list[AnyHostMessage | None] = []
    wait_until(lambda: hosts.pump() or found.append(heard(links)) or found[-1], PATIENCE, "an answer")  # type: ignore[func-returns-value]
    return found[-1]


def test_a_host_is_let_in_once(hosts: OtherHosts) -> None:
    first, second = knock(hosts), knock(hosts)
    assert isinstance(answer(hosts, first, JOIN), Accepted)
    assert hosts.has(2)
    assert not hosts.has(1)
    refused = answer(hosts, second, JOIN)
    assert isinstance(refused, Refused)
    assert refused.reason == "node 1 (there) has joined already; give every host a different --node-rank"
    hosts.meet()


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
def test_a_host_that_differs_is_refused(hosts: OtherHosts, change: dict[str, object], reason: str) -> None:
    channel = knock(hosts)
    refused = answer(hosts, channel, msgspec.structs.replace(JOIN, **change))
    assert isinstance(refused, Refused)
    assert reason in refused.reason
    assert reason in hosts.said[-1]  # type: ignore[attr-defined]
    assert not hosts.has(2)


def test_a_host_without_the_secret_is_turned_away_and_named_once(hosts: OtherHosts) -> None:
    for _ in range(2):
        rejected = hosts.rejected
        with pytest.raises(PeerLost, match="secret"):
            knock(hosts, b"another secret, as long as ours")
        assert hosts.rejected > rejected
    assert hosts.said == [  # type: ignore[attr-defined]
        "refused 127.0.0.1: the process at the other end of a connection does not know the secret of this run"
    ]


@pytest.mark.parametrize(("left", "lost"), [(True, ""), (False, "it was killed")])
def test_a_host_that_was_lost_is_told_how_to_come_back(hosts: OtherHosts, left: bool, lost: str) -> None:
    first, second = knock(hosts), knock(hosts)
    assert isinstance(answer(hosts, first, JOIN), Accepted)
    hosts._hosts[1].left, hosts._hosts[1].lost = left, lost
    refused = answer(hosts, second, JOIN)
    assert isinstance(refused, Refused)
    assert "node 1 (there) was part of this run and is not any more; a run of flockstep train with" in refused.reason
    assert "flockstep resume" in refused.reason


def test_an_agent_of_another_version_is_refused_in_a_sentence(
    hosts: OtherHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first message has a field more."""
    channel = knock(hosts)
    fields = {**msgspec.structs.asdict(JOIN), "type": "Join", "newer": 1}
    data = msgspec.msgpack.encode(fields)
    with monkeypatch.context() as patch:
        patch.setattr(host_messages, "packed", lambda message, payload: len(data).to_bytes(4, "little") + data)
        channel.send(LAUNCHER, JOIN)
    refused = answered(hosts, channel)
    assert isinstance(refused, Refused)
    assert "install the same version on every host" in refused.reason


def test_who_stops_while_the_run_ends_is_heard_later(hosts: OtherHosts) -> None:
    """`pump` raises nothing, so that what has arrived with it is handled; `require_running` raises it."""
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    channel.send(LAUNCHER, Stopped("stopped there"))
    channel.send(LAUNCHER, Heard(0, b"and this"))
    assert not hosts.waiting
    wait_until(lambda: hosts.pump() or hosts.waiting, PATIENCE, "both messages")  # type: ignore[func-returns-value]
    assert [words for words, _ in hosts.heard()] == [b"and this"]
    with pytest.raises(KeyboardInterrupt, match="stopped there"):
        hosts.require_running()
    hosts.require_running()  # while the run takes its last checkpoint


def test_servers_run_beside_a_worker_or_on_the_hosts_in_turn(hosts: OtherHosts) -> None:
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


def test_processes_that_nobody_ends_are_lost_with_their_host(hosts: OtherHosts) -> None:
    """A host whose beats go on, and that does nothing else; also where the run is closed without waiting."""
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    child = hosts.start(NodeSpec("run", 2, "", "", "tcp", 5.0, "", 4, 0))
    assert child is not None
    assert child.exit_code() is None
    hosts.abandon()
    assert child.exit_code() == HOST_LOST


class SentMessages:
    """Links that keep what an agent sends."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.messages: list[Any] = []
        self.bus = SimpleNamespace(
            fileno=lambda: 0, backlog=lambda peer: 0, set_limits=nothing, broken=lambda seconds: set()
        )
        self.resumptions: list[object] = []

    def send(self, peer: int, message: HostMessage, payload: object = b"") -> None:
        self.names.append(type(message).__name__)
        self.messages.append(message)

    def receive(self) -> None:
        pass


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


def agent_with(ended: EndedProcess, links: SentMessages) -> Any:
    agent: Any = HostAgent(Meeting("127.0.0.1", 1, SECRET), JOIN, nothing, 5.0)
    agent._links, agent._control, agent._frames, agent._children = links, ended, {0: ended}, {0: ended}
    return agent


def test_a_host_says_that_its_process_was_killed_for_lack_of_memory(hosts: OtherHosts) -> None:
    sent = SentMessages()
    agent = agent_with(EndedProcess(0), sent)
    agent._memory = OutOfMemoryDetector(iter((0, 1)).__next__)
    agent._turn(0.0)
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    child = hosts.start(NodeSpec("run", 2, "", "", "tcp", 5.0, "", 4, 0))
    assert child is not None
    channel.send(LAUNCHER, sent.messages[-1])
    wait_until(lambda: hosts.pump() or child.exit_code() is not None, PATIENCE, "its end")  # type: ignore[func-returns-value]
    assert child.exit_code() == -signal.SIGKILL
    assert child.reason is not None
    assert child.reason.startswith(", probably by the kernel for lack of memory")


def test_a_host_that_has_come_says_who_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.launchers.wait_monitor.PERIOD", 0.0)
    meeting, placement = Meeting("127.0.0.1", 0, SECRET, 0.5), {1: range(2, 4), 2: range(4, 5)}
    with OtherHosts(meeting, ExpectedHosts(range(1, 3), placement, 5, {}), "", 5.0, say=nothing) as hosts:
        hosts.agents = []  # type: ignore[attr-defined]
        channel = knock(hosts)
        assert isinstance(
            answer(hosts, channel, msgspec.structs.replace(JOIN, nodes=3, workers=5, settings={})), Accepted
        )
        with pytest.raises(PeerLost, match="secret"):
            knock(hosts, b"another secret, as long as ours")
        told = r"node 2 of 3 \(rank 4 of 5\) did not join within 0\.5 s \(refused 127\.0\.0\.1: the process at the"
        with pytest.raises(
            ConfigurationError, match=rf"{told} .* not know the secret.*\); remove the reason of the refusal"
        ):
            hosts.meet()
        said: list[str] = []
        agent: Any = HostAgent(Meeting("127.0.0.1", 1, SECRET), JOIN, nothing, 5.0, say=said.append)
        while (message := heard(channel)) is not None:
            agent._handle(message, memoryview(b""))
        for links in hosts.agents:  # type: ignore[attr-defined]
            links.bus.close(0.0)
        assert said[0] == "waiting for node 2 of 3 (rank 4 of 5)"


def test_a_host_says_that_the_coordinator_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something listens there, and is silent."""
    monkeypatch.setattr("flockstep.launchers.wait_monitor.PERIOD", 0.0)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        meeting = Meeting("127.0.0.1", silent.getsockname()[1], SECRET, 0.5)
        agent = HostAgent(meeting, JOIN, nothing, 5.0, say=said.append)
        with pytest.raises(ConfigurationError, match=r"within 0\.5 s \(connected, but no answer has come yet\)"):
            agent.run()
    where = f"waiting for the coordinator at {meeting.where}"
    assert f"{where} (connected, but no answer has come yet)" in said


def test_hosts_are_told_how_the_run_has_ended(hosts: OtherHosts) -> None:
    channel = knock(hosts)
    assert isinstance(answer(hosts, channel, JOIN), Accepted)
    with pytest.raises(RunError, match="evaluation"), hosts:
        raise RunError("the evaluation failed")
    assert heard(channel) == Over("the evaluation failed", 1)


def test_the_last_messages_of_a_process_come_before_its_end() -> None:
    ended, channel = EndedProcess(100), SentMessages()
    agent = agent_with(ended, channel)
    for _ in range(10):
        agent._turn(0.0)
    assert channel.names[:100] == ["FramesOf"] * 100
    assert channel.names[100:102] == ["Closed", "Exited"]
    assert channel.names.count("Exited") == 1


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
        meeting_at("nowhere.invalid:29400", SECRET).listen(5.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"cannot listen at {where}: Address already in use"):
            meeting_at(where, SECRET).listen(5.0)
    with pytest.raises(ConfigurationError, match="Cannot assign requested address"):
        meeting_at("192.0.2.1:29400", SECRET).listen(5.0)


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


def test_the_coordinator_hears_that_a_host_that_joins_has_other_files(hosts: OtherHosts) -> None:
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
    channel.send(LAUNCHER, sent.messages[-1])
    wait_until(lambda: hosts.pump() or not hosts.joining, PATIENCE, "it is turned back")  # type: ignore[func-returns-value]
    assert hosts.said[-1].endswith("does not join: other files")  # type: ignore[attr-defined]


def test_a_name_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(*arguments: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    with pytest.raises(
        ConfigurationError, match=r"host name 'nodeX' does not resolve on this machine: .*; correct the"
    ):
        address_towards("nodeX")


def test_what_a_trusted_host_announces_takes_no_memory_before_it_arrives(hosts: OtherHosts) -> None:
    """64 GiB, the most that is allowed: they are waited for, or refused where they are more than the memory."""
    channel, before = knock(hosts), resident()
    connection, host = channel.bus._peers[LAUNCHER], hosts._links.bus
    channel.bus._flush(connection, memoryview(struct.pack("<IQQ", 5 | 1 << 31, MAX_MESSAGE, 0) + b"hello"))
    peer = host._peers[channel._identity.address]
    wait_until(lambda: hosts.pump() or peer.body is not None or not peer.open, PATIENCE, "the announcement")  # type: ignore[func-returns-value]
    assert resident() - before < 64 << 20


def test_a_host_that_is_a_task_may_be_away_as_long_as_the_user_says() -> None:
    config = RunConfig(kind="train", job="softmax", strategy="all_reduce", workers=2, link_timeout=7.0)
    with ExitStack() as stack:
        gathering = TaskGathering(Meeting("127.0.0.1", 0, SECRET), 2, starter=lambda specs, stack: lambda: None)
        hosts = gathering.hosts(config, {}, stack)
        assert hosts._links.bus._link_timeout == 7.0
