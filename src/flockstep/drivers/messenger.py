"""What moves a node's messages between processes, for a strategy's programs and for a script's own calls."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from flockstep.arrays.namespace import beside, on_host
from flockstep.drivers.account import Account, Emit
from flockstep.drivers.member import stopped
from flockstep.drivers.runner import Runner
from flockstep.errors import PeerLost
from flockstep.messages import Address, Message, node_name
from flockstep.nodes import Node
from flockstep.transports.bus import LAUNCHER, Bus

RETRY = 0.005
"""Seconds after which what the bus had no room for is tried again."""
Receive = Callable[..., Message | None]
"""The next message of a peer or the supervisor; None if there is none within so many seconds (None: no limit)."""


class Messenger(ABC):
    """Sends a node's messages, and delivers those of others; what the bus has no room for waits, peer by peer."""

    def __init__(self, bus: Bus, receive: Receive, node: Node, emit: Emit | None):
        self.node = node
        self._start = time.monotonic()
        self._bus, self._receive = bus, receive
        self._held: dict[Address, deque[Message]] = {}
        self.runner = Runner(node, self, Account(node.address, emit, bus.traffic), self.now)
        node.freeze, node.port_copies = bus.lend, True

    @abstractmethod
    def drive(self, runner: Runner) -> None:
        """Deliver messages, waiting for them, until the program waits for none."""

    def now(self) -> float:
        """Seconds since all nodes were ready."""
        return time.monotonic() - self._start

    def send(self, to: Address, message: Message) -> None:
        """Send to a peer, and wait until there is room for it; what has arrived meanwhile is taken in."""
        nested = to in self._held  # what has arrived while an earlier message waits for room sends more
        self.hand_over(to, message)
        while to in self._held and not nested:
            if not self._bus.reachable(to):
                self.unreachable(to)
            elif (arrived := self._receive(RETRY)) is not None:
                self.take(arrived)
            self.retry()

    def hand_over(self, to: Address, message: Message) -> None:
        """Send to a peer, after what waits for it; what goes to a lost one goes nowhere."""
        if message.array is not None:
            message.array = on_host(message.array)
        held = self._held.get(to)
        if held is None and self._sent(to, message):
            return
        if message.array is not None:  # it may change while the message waits
            message.array = self.node.freeze(message.array)
        self._held.setdefault(to, deque()).append(message)

    def retry(self) -> None:
        """Send what waits, as far as there is room for it."""
        for to, held in list(self._held.items()):
            while held and self._sent(to, held[0]):
                held.popleft()
            if not held:
                self._held.pop(to, None)

    def _sent(self, to: Address, message: Message) -> bool:
        """Whether a message went where it can go."""
        if to not in self.node.lost:
            try:
                self._bus.send(to, message)
            except PeerLost:  # it is slow, or its connection has broken: whether it is lost is for the supervisor
                return False
        return True

    def collect(self) -> None:
        """Deliver what has arrived by now."""
        while (message := self._receive(0)) is not None:
            self.take(message)
        self.node.poll()

    def take(self, message: Message) -> None:
        """Deliver a message, or do what the supervisor says.

        Raises:
            Interrupted: the supervisor ended the run.
        """
        if message.source != LAUNCHER:
            if message.array is not None:
                message.array = beside(message.array, self.node.params)
            self.runner.deliver(message)
        elif message.tag == "stop":
            raise stopped(message)
        elif message.tag == "lost":
            address, self.node.view = message.note.address, message.note.view
            self.note_loss(address, message.note.reason)
            self._bus.disconnect(address)
            self.runner.lose(address)

    def note_loss(self, address: Address, reason: str) -> None:
        """A node is dead, for that reason; raises `PeerLost` where this one cannot go on without it."""
        raise PeerLost(reason)

    def unreachable(self, to: Address) -> None:
        """A connection has broken; returns once it is known that the peer is lost and this node can go on."""
        raise PeerLost(f"{node_name(to)} is not reachable from {node_name(self.node.address)}")
