"""A node outside a run: runs programs in one process over a transport, without metrics or supervision."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from flockstep.errors import FlockstepError
from flockstep.links.kinds import Transport
from flockstep.links.wire import SenderIdentity
from flockstep.messages import Wanted
from flockstep.nodes import Cluster, Peer
from flockstep.programs import Effect
from flockstep.runtime.messenger import Messenger
from flockstep.runtime.runner import Runner
from flockstep_lab.bench.implementation import BenchProcess


class BareNode(Messenger):
    """One node on a transport; programs send and receive messages through `peer`."""

    def __init__(self, transport: Transport, name: str, place: BenchProcess):
        me = SenderIdentity("bench", place.rank, "0" * 16, place.largest, secret=place.secret)
        self.bus = transport.bus(me, place.folder, f"{name}-{place.rank}")
        self.peer = Peer(place.rank, Cluster(place.workers), np.zeros(0), np.random.default_rng(place.rank))
        super().__init__(self.bus, self.bus.poll, self.peer, None)

    def connect(self, addresses: Sequence[str]) -> None:
        """Connect to all other nodes, and wait until all are reachable; `addresses` holds the nodes' addresses, in
        order of rank.
        """
        others = {rank: address for rank, address in enumerate(addresses) if rank != self.peer.rank}
        self.bus.connect(others)
        while not all(map(self.bus.reachable, others)):
            if (message := self.bus.poll(0.1)) is not None:
                self.take(message)

    def run(self, program: Coroutine[Effect, Any, Any]) -> Any:
        """Run a program to its end and return its result."""
        returned: list[Any] = []

        async def whole() -> None:
            returned.append(await program)

        self.runner.begin(whole())
        self.drive(self.runner)
        return returned[0]

    def drive(self, runner: Runner) -> None:
        """Run a program, and deliver its messages, until the program has ended."""
        while not runner.done:
            if not isinstance(runner.waiting, Wanted):
                raise FlockstepError(f"a benchmark's program may wait only for messages, got {runner.waiting}")
            if (message := self.bus.poll(None, (), runner.waiting)) is not None:
                self.take(message)

    def close(self) -> None:
        """Close the socket of the node."""
        self.bus.close(0)
