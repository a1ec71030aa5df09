"""What moves a node's messages between processes, for a strategy's programs and for a script's own calls."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

from flockstep.drivers.account import Account, Emit
from flockstep.drivers.member import stopped
from flockstep.drivers.runner import Runner
from flockstep.errors import PeerLost
from flockstep.messages import Address, Message
from flockstep.nodes import Node
from flockstep.transports.bus import LAUNCHER, Bus


class Membership(Protocol):
    """What receives the messages of the peers, and what the supervisor says."""

    bus: Bus

    def receive(self, seconds: float | None, also: int | None = None) -> Message | None:
        """The next message, from anyone; None if there is none within that time, or `also` can be read."""


class Messenger(ABC):
    """Sends a node's messages, and delivers those of others; what the bus has no room for waits, peer by peer."""

    def __init__(self, member: Membership, node: Node, emit: Emit | None):
        self.node = node
        self._start = time.monotonic()
        self._bus, self._receive = member.bus, member.receive
        self._held: dict[Address, deque[Message]] = {}
        self.runner = Runner(node, self, Account(node.address, emit, member.bus.traffic), self.now)
        node.freeze, node.port_copies = member.bus.lend, True

    @abstractmethod
    def drive(self, runner: Runner) -> None:
        """Deliver messages, waiting for them, until the program waits for none."""

    def now(self) -> float:
        """Seconds since all nodes were ready."""
        return time.monotonic() - self._start

    def send(self, to: Address, message: Message) -> None:
        """Send to a peer, after what waits for it; what goes to a lost one goes nowhere."""
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
            self.runner.deliver(message)
        elif message.tag == "stop":
            raise stopped(message)
        elif message.tag == "lost":
            address = int(message.note["address"])
            self.mourn(address, str(message.note["reason"]))
            self._bus.disconnect(address)
            self.runner.lose(address)

    @abstractmethod
    def mourn(self, address: Address, reason: str) -> None:
        """A node is dead, for that reason; raises `PeerLost` where this one cannot go on without it."""
