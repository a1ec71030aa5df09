"""One worker and its servers in a single process: what a script does that nobody launched on several."""

from __future__ import annotations

import time

import numpy as np

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.drivers.account import Account
from flockstep.drivers.renewal import Reception, Renewed
from flockstep.drivers.settings import taken_over
from flockstep.errors import RunError
from flockstep.messages import HEADER_BYTES, Address, Message, Wanted, node_name, server
from flockstep.nodes import Cluster, Node, Server
from flockstep.optimizers.base import Optimizer
from flockstep.programs import Program, Work
from flockstep.strategies.base import Strategy


class SoloSeat:
    """The worker's side: messages to a server are handled on the spot."""

    def __init__(self) -> None:
        self.account = Account(0, lambda event: None)
        self.node: Node
        self._servers: dict[Address, _Local] = {}
        self._held: list[slice] = []
        self._start = time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def serve(self, strategy: Strategy, params: FlatArray, optimizer: Optimizer, schema: Schema) -> None:
        """Start the strategy's servers."""
        cluster, held = Cluster(1, strategy.servers_for(1)), strategy.held(1, len(params))
        self._held = held
        for index, part in enumerate(held):
            local = self._servers[server(index)] = _Local(self)
            random = np.random.default_rng(index)
            node = Server(index, cluster, params[part].copy(), local, random, optimizer)
            node.schema, node.held = schema, part
            node.optimizer_state.start = part.start
            node.notes, node.state = strategy.notes, strategy.master_state(node)
            local.start(node, strategy)

    def served(self) -> FlatArray:
        """The parameters that the servers hold."""
        whole = self.node.params.copy()
        for index in reversed(range(len(self._held))):
            whole[self._held[index]] = self._servers[server(index)].node.params
        return whole

    def send(self, to: Address, message: Message) -> None:
        """Let the server handle it at once."""
        self.account.traffic.sent(message, HEADER_BYTES)
        self._servers[to].take(message)

    def hand_on(self, to: Address, message: Message) -> None:
        """Deliver what a server sends to the worker or to another server."""
        if to in self._servers:
            self._servers[to].take(message)
        else:
            self.node.deliver(message)

    def collect(self) -> None:
        """Nothing is ever on its way."""

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        """Nobody keeps a record here."""

    def figure(self, name: str, value: float) -> None:
        """Nobody keeps a record here."""

    def report(self, loss: float | None) -> None:
        """Nobody watches here."""

    def tick(self) -> None:
        """Nobody evaluates here."""

    def server_ticks(self) -> None:
        """Nobody evaluates here."""

    def join(self, work: Work) -> None:
        """Wait until something outside of messages is done."""
        while not work.wait(1.0):
            pass

    def wait(self, wanted: Wanted) -> Message:
        """The message must be here already, or it will never come."""
        raise RunError(f"a single worker waits for {wanted} at step {self.node.step}, which nobody will send")


class _Local:
    """A server's side."""

    def __init__(self, worker: SoloSeat):
        self._worker = worker
        self._wanted: Wanted | None = None
        self.node: Server
        self._program: Program

    def start(self, node: Server, strategy: Strategy) -> None:
        self.node, self._program, self._strategy = node, strategy.master(node), strategy
        self._reception = Reception(node, strategy)
        self._resume(None)

    def take(self, message: Message) -> None:
        if self._reception.hears(message):
            self._attend()
            return
        if taken_over(self.node, message):
            return
        self.node.deliver(message)
        while self._wanted is not None and (found := self.node.mailbox.take(self._wanted)) is not None:
            self._resume(found)

    def send(self, to: Address, message: Message) -> None:
        self._worker.hand_on(to, message)

    def collect(self) -> None:
        pass

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        pass

    def figure(self, name: str, value: float) -> None:
        pass

    def _attend(self) -> None:
        try:
            self._reception.attend(idle=True)
        except Renewed:
            self._program.close()
            self._reception.renew()
            self._program = self._strategy.master(self.node)
            self._resume(None)

    def _resume(self, value: Message | None) -> None:
        self._wanted = None
        try:
            effect = self._program.send(value)
        except StopIteration:
            self._reception.end()
            return
        assert isinstance(effect, Wanted), f"{node_name(self.node.address)} asked for a gradient"
        self._wanted = effect
