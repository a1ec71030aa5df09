"""What a node that waits makes of the leaving of others, without processes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flockstep.errors import PeerLost
from flockstep.links.bus import LAUNCHER, Traffic
from flockstep.messages import Message, frozen, server
from flockstep.nodes import BadGradients, Cluster, View, Worker
from flockstep.runtime.member import LOSS_TOLD
from flockstep.runtime.real import NodeConnection
from flockstep.strategies.base import Strategy


def waiting(tmp_path: Any, arriving: list[Message], who: int, broken: frozenset[int] = frozenset()) -> Message:
    """What worker 0, after its third step, gets when it waits for a message of `who`; nobody survives a death."""
    coming = deque(arriving)
    node_spec = SimpleNamespace(
        address=0, record=str(tmp_path), run="r", heartbeat=1.0, workers=2, bad_gradients=BadGradients()
    )
    bus = SimpleNamespace(
        copy_for_sending=frozen,
        traffic=Traffic(),
        broken=lambda seconds: set(broken if seconds == LOSS_TOLD else ()),
        why_broken=lambda peer: f"the connection to worker {peer} broke: nothing arrived for 1.0 s",
    )
    member: Any = SimpleNamespace(
        node_spec=node_spec,
        view=View(0, (0, 1)),
        memory=None,
        host_memory=None,
        tape=None,
        bus=bus,
        receive=lambda *_: coming.popleft(),
        tell=lambda *_: None,
        seconds=lambda: 0.0,
        clock=(0.0, 0.0),
        hosts=((0, 1),),
    )
    stepper: Any = SimpleNamespace()
    worker = Worker(0, Cluster(2, 2), np.zeros(2), np.random.default_rng(0), stepper, None)
    connection = NodeConnection(member, worker, Strategy.parse("ps"), lambda _: None)
    worker.step, got = 3, list[Message]()

    async def program() -> None:
        got.append(await worker.receive("state", who))

    connection.runner.begin(program())
    connection.drive(connection.runner)
    return got[0]


def left(address: int, step: int) -> Message:
    return Message(
        LAUNCHER, "left", note={"address": address, "step": step, "how": f"worker {address} left after step {step}"}
    )


@pytest.mark.parametrize("gone", [0, 1])
def test_a_server_that_has_answered_and_left_ends_no_wait(tmp_path: Any, gone: int) -> None:
    """Servers make no steps and leave last; its message may come after the word of its leaving, by another link."""
    answer = Message(server(0), "state", np.ones(2), number=1)
    assert waiting(tmp_path, [left(server(gone), 0), answer], server(0)) is answer


def test_a_worker_that_has_left_after_fewer_steps_does(tmp_path: Any) -> None:
    with pytest.raises(PeerLost, match="worker 1 left after step 2; worker 0 at step 3 waited"):
        waiting(tmp_path, [left(1, 2)], 1)


def test_a_connection_that_broke_though_both_live_ends_the_wait(tmp_path: Any) -> None:
    """Three heartbeats after it broke: by then the supervisor would have said who has died."""
    with pytest.raises(
        PeerLost,
        match=r"worker 1 broke: nothing arrived for 1\.0 s, although both processes are alive; worker 0 at step 3 w",
    ):
        waiting(tmp_path, [], 1, broken=frozenset({1}))
