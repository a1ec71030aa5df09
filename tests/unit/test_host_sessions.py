"""The connection between a host and the coordinator over a faulty link: each message arrives once and in order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from flockstep.errors import FlockstepError
from flockstep.launchers.host_agent import HostAgent
from flockstep.launchers.host_messages import Accepted, Join, Told
from flockstep.launchers.hosts import ExpectedHosts, OtherHosts
from flockstep.launchers.meeting import Meeting
from flockstep_lab.link_faults import FaultProxy
from support.matrix import few
from support.processes import PATIENCE, wait_until

SECRET = b"a secret of these tests alone!!!"
JOIN = Join(1, 2, 4, (2, 3), {}, name="there")
COUNT = 120
nothing: Any = lambda *given: None


class Agent:
    """The agent of a host, in a thread; it reports `COUNT` messages of 20 kB, and keeps what it is told."""

    def __init__(self, address: tuple[str, int], heartbeat: float, link_timeout: float):
        self.said: list[str] = []
        meeting = Meeting(*address, SECRET, timeout=PATIENCE)
        self.agent: Any = HostAgent(meeting, JOIN, nothing, heartbeat, link_timeout, say=self.said.append)
        self.agent._control = self
        self.failure: FlockstepError | None = None
        self.over = Event()
        self._left = iter(range(COUNT))
        self.thread = Thread(target=self._run, daemon=True)
        self.thread.start()

    def wait(self, sources: object, seconds: float, also: object) -> None:
        self.over.wait(0.002)

    def heard(self) -> list[tuple[bytes, Any]]:
        silent = SimpleNamespace(disconnected=bool, receive=nothing, close=nothing)
        return [(b"%06d" % number * 3_000, silent) for number in islice(self._left, 1)]

    def _run(self) -> None:
        try:
            self.agent._links = self.agent._reach()
            self.agent._accepted = self.agent._admitted()
            while not self.over.is_set():
                self.agent._turn(0.0)
        except FlockstepError as error:
            self.failure = error


@contextlib.contextmanager
def connected(
    fault: str, most: int, heartbeat: float = 2.0, link_timeout: float = 60.0
) -> Iterator[tuple[OtherHosts, list[str], Agent, FaultProxy]]:
    """A coordinator and an agent, which has joined, with a faulty link between them."""
    said: list[str] = []
    meeting, expected = Meeting("127.0.0.1", 0, SECRET, PATIENCE), ExpectedHosts(range(1, 2), {1: range(2, 4)}, 4, {})
    hosts = OtherHosts(meeting, expected, "", heartbeat, link_timeout, said.append)
    proxy = FaultProxy(("127.0.0.1", hosts.port), (fault,), 1, 300_000, most)
    agent = Agent(proxy.address, heartbeat, link_timeout)
    try:
        hosts.meet()
        wait_until(lambda: hosts.pump() or hasattr(agent.agent, "_accepted"), PATIENCE, "it is admitted")  # type: ignore[func-returns-value]
        assert isinstance(agent.agent._accepted, Accepted)
        yield hosts, said, agent, proxy
    finally:
        hosts.close("", 0)
        agent.over.set()
        agent.thread.join()
        agent.agent._links.bus.close(0.0)
        proxy.close()


FAULTS = ("cut", "close", "half_open", "late", "delay", "corrupt", "drop", "repeat", "reorder")


@pytest.mark.parametrize("fault", few(FAULTS, "cut", "corrupt", "late"))
def test_messages_of_a_host_arrive_once_and_in_order(fault: str) -> None:
    with connected(fault, 1 if fault == "half_open" else 3) as (hosts, said, agent, proxy):
        host = hosts._hosts[1]
        for number in range(COUNT):
            host.send(Told("waiting for " + f"{number}" * 2_000))
        arrived: list[bytes] = []

        def done() -> bool:
            hosts.pump()
            arrived.extend(data for data, _ in hosts.heard())
            assert not host.lost, host.lost
            assert agent.failure is None, agent.failure
            return len(arrived) == COUNT and len(told()) == COUNT

        def told() -> list[str]:
            return [text for text in agent.said if text.startswith("waiting for")]

        wait_until(done, PATIENCE, "all messages")
        assert arrived == [b"%06d" % number * 3_000 for number in range(COUNT)]
        assert told() == ["waiting for " + f"{number}" * 2_000 for number in range(COUNT)]
        assert proxy.fired[fault] > 0, "the fault did not fire"
        if fault != "delay":
            assert any("node 1 (there) reconnected after" in text for text in said)
            assert any(" again after " in text for text in agent.said)


def test_a_host_that_stays_away_longer_than_the_limit_is_lost_at_both_ends() -> None:
    with connected("cut", 0, 1.0, 0.5) as (hosts, said, agent, proxy):
        proxy.down.set()
        wait_until(lambda: hosts.pump() or hosts._hosts[1].lost, PATIENCE, "it is lost")  # type: ignore[func-returns-value]
        assert "and the link was down for" in said[-1]
        assert "longer than the link timeout of 0.5 s" in said[-1]
        wait_until(lambda: agent.failure is not None, PATIENCE, "the agent gives up")
        assert "is lost: nothing arrived for" in str(agent.failure)


def test_a_host_that_was_given_up_is_not_taken_back() -> None:
    with connected("cut", 0, 1.0) as (hosts, _, agent, proxy):
        hosts._links.bus.set_limits(1.0, 0.5)
        proxy.down.set()
        wait_until(lambda: hosts.pump() or hosts._hosts[1].lost, PATIENCE, "it is lost")  # type: ignore[func-returns-value]
        proxy.down.clear()
        wait_until(lambda: hosts.pump() or agent.failure is not None, PATIENCE, "the agent is refused")  # type: ignore[func-returns-value]
        assert "the other end gave it up" in str(agent.failure)
