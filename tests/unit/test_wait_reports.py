"""When a worker reports to the supervisor that it waits."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from flockstep.drivers.real import NodeConnection
from flockstep.messages import Message, frozen
from flockstep.nodes import BadGradients, Cluster, View, Worker
from flockstep.strategies.base import Strategy
from flockstep.transports.bus import Traffic

PAUSE = 30.0
"""Seconds between a step and the next gradient, such as an evaluation takes."""


def test_a_wait_begins_with_the_gradient_and_not_with_the_last_step() -> None:
    """After a long pause between two steps, a worker that waits for less than a second reports nothing."""
    clock, told = SimpleNamespace(now=0.0), list[float]()
    waits = deque([0.25] * 5)

    def receive(seconds: float | None, *_: object) -> Message | None:
        if seconds == 0:
            return None
        if not waits:
            return Message(1, "answer")
        clock.now += waits.popleft()
        return None

    bus = SimpleNamespace(copy_for_sending=frozen, broken=lambda _: set(), traffic=Traffic())
    member: Any = SimpleNamespace(
        node_spec=SimpleNamespace(address=0, run="run", record=".", heartbeat=1.0, bad_gradients=BadGradients()),
        view=View(0, (0, 1)),
        memory=None,
        host_memory=None,
        bus=bus,
        receive=receive,
        send_in_parts=lambda *_: None,
        tell=lambda tag, *_: told.append(clock.now) if tag == "waiting" else None,
        seconds=lambda: clock.now,
        clock=(0.0, 0.0),
        hosts=((0, 1),),
    )
    stepper: Any = SimpleNamespace()
    worker = Worker(0, Cluster(2, 0), np.zeros(2), np.random.default_rng(0), stepper, None)
    connection = NodeConnection(member, worker, Strategy.parse("all_reduce"))

    async def program() -> None:
        await worker.gradient()
        await worker.receive("answer", 1)

    connection.runner.begin(program())
    clock.now = PAUSE
    connection.runner.advance(np.zeros(2))
    assert told == [PAUSE + 1.0]
