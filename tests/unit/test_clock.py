"""When the clock of a real run starts: after all that prepares a node, so that the first step costs what others do."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from flockstep.launchers import entry
from flockstep.links.bus import Traffic
from flockstep.nodes import Cluster
from flockstep.records.config import RunConfig
from flockstep.runtime import process, session
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.setup import prepare


class ClockStarts(Exception):
    """Raised where the clock would start."""


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What a node does before the clock starts, in order; the node ends there."""
    done: list[str] = []

    class FakeMember:
        def __init__(self, node_spec: NodeSpec, *rest: Any):
            self.node_spec, self.bus, self.closed = node_spec, type("Bus", (), {"traffic": Traffic()})(), False

        def join(
            self, strategy: str, optimizer: dict[str, Any], initial: Any, part: bool = False, repeats: bool = False
        ) -> Any:
            done.append("join")
            return Cluster(2, 1), prepare(CONFIG)[0].home() if initial is None else initial

        def begin(self) -> None:
            done.append("begin")
            raise ClockStarts

        def fail(self, failure: Any) -> None:
            assert failure.reason.startswith(("worker 0 raised ClockStarts", "server 0 raised ClockStarts"))

        def close(self, linger: float) -> None:
            pass

    def noted(name: str, original: Any) -> Any:
        return lambda *given, **named: done.append(name) or original(*given, **named)

    monkeypatch.setattr(session, "Member", FakeMember)
    monkeypatch.setattr(process, "release", noted("collect garbage", process.release))
    monkeypatch.setattr(entry, "settle_down", noted("keep what is there", lambda: None))
    monkeypatch.setattr(entry, "warm_up", noted("compute a gradient", process.warm_up))
    monkeypatch.setattr(process, "make_server", noted("make the server", process.make_server))
    monkeypatch.setattr(process, "NodeConnection", noted("start the clock", None))
    before = signal.getsignal(signal.SIGINT)
    yield done
    signal.signal(signal.SIGINT, before)


CONFIG = RunConfig(kind="train", job="softmax", strategy="bsp", workers=2, transport="ipc", steps=4)


def node_spec(address: int) -> NodeSpec:
    return NodeSpec("run", address, "", "", "ipc", 5.0, "", 2, 0)


def test_a_worker_collects_garbage_before_the_clock_starts(order: list[str]) -> None:
    make = entry._Maker(None)
    assert process.JobWorker().run(node_spec(0), lambda: make(CONFIG)) == 1
    assert order == ["compute a gradient", "keep what is there", "join", "collect garbage", "begin"]
    engine, again = make(CONFIG)[0], make(dataclasses.replace(CONFIG, workers=3))
    assert again[0] is engine, "a worker that continues with others has data and model"
    assert again[1].cluster.workers == 3
    assert order.count("compute a gradient") == order.count("keep what is there") == 1


def test_a_server_is_made_before_the_clock_starts(order: list[str]) -> None:
    engine, plan, _ = prepare(CONFIG)
    assert process.run_server(node_spec(-1), 0, str(plan.strategy), str(plan.optimizer), engine.schema, 0) == 1
    assert order == ["join", "make the server", "begin"]
