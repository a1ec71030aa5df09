"""A node without a run around it: programs of one process over a transport, without books or supervision."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from flockstep.bench.ways import Place
from flockstep.drivers.account import Account
from flockstep.drivers.runner import Runner
from flockstep.errors import FlockstepError
from flockstep.messages import Address, Array, Message, Wanted
from flockstep.nodes import Cluster, Worker
from flockstep.programs import Effect
from flockstep.transports.base import Transport
from flockstep.transports.bus import Backlog
from flockstep.transports.wire import Identity


class Post:
    """One node on a transport; `node` is what programs are written for."""

    def __init__(self, transport: Transport, name: str, place: Place):
        me = Identity("bench", place.rank, "0" * 16, place.largest)
        self.bus = transport.bus(me, place.folder, f"{name}-{place.rank}")
        random = np.random.default_rng(place.rank)
        self.node = Worker(place.rank, Cluster(place.workers), np.zeros(0), random, _Unused(), None)
        self._runner = Runner(self.node, self, Account(place.rank, None), time.monotonic)
        self.node.freeze, self.node.port_copies = self.bus.lend, True

    def connect(self, told: Sequence[str]) -> None:
        """Connect to all others, and have heard of each."""
        others = {rank: address for rank, address in enumerate(told) if rank != self.node.rank}
        self.bus.connect(others)
        while not all(map(self.bus.reachable, others)):
            self._take(self.bus.poll(0.1))

    def run(self, program: Coroutine[Effect, Any, Any]) -> Any:
        """Run a program to its end; what it returns."""
        returned: list[Any] = []

        async def whole() -> None:
            returned.append(await program)

        self._runner.begin(whole())
        self.drive(self._runner)
        return returned[0]

    def drive(self, runner: Runner) -> None:
        """Wait for messages until the program has ended."""
        while not runner.done:
            if not isinstance(runner.waiting, Wanted):
                raise FlockstepError(f"a program of a measurement may wait for messages only, got {runner.waiting}")
            self._take(self.bus.poll(None))

    def send(self, to: Address, message: Message) -> None:
        """Send; wait where too much waits already."""
        while True:
            try:
                self.bus.send(to, message)
            except Backlog:
                if message.array is not None:
                    message.array = self.bus.lend(message.array)
                self._take(self.bus.poll(0.01))
            else:
                return

    def collect(self) -> None:
        """Take in what has arrived."""
        while (arrived := self.bus.poll(0)) is not None:
            self._runner.deliver(arrived)

    def close(self) -> None:
        """Close the socket."""
        self.bus.close(0)

    def _take(self, message: Message | None) -> None:
        if message is not None:
            self._runner.deliver(message)


class _Unused:
    """In the place of an optimiser."""

    lr = 0.0

    def step(self, params: Array, gradient: Array) -> None:
        """Nothing is trained."""

    def reset(self, params: Array) -> None:
        """Nothing."""
