"""Sends and delivers a node's messages between processes, for the programs of a strategy and for the calls of a
script.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from flockstep import nodes
from flockstep.arrays.namespace import to_device_of, to_host
from flockstep.errors import PeerLost
from flockstep.links.streams import StreamBus
from flockstep.messages import LAUNCHER, Address, Message, node_name
from flockstep.nodes import Node
from flockstep.records import failpoints
from flockstep.records.flight import FlightRecorder
from flockstep.runtime.member import AGAIN, begin_again, stopped
from flockstep.runtime.node_metrics import Emit, NodeMetrics
from flockstep.runtime.part_link import PartLink
from flockstep.runtime.runner import Runner

RETRY = 0.005
"""Seconds after which a message is sent again if the bus had no room for the message."""
Receive = Callable[..., Message | None]
"""Function that returns the next message from a peer or the supervisor; None if no message arrives within the given
seconds (None: no limit).
"""


class Messenger(ABC):
    """Sends a node's messages, and delivers the messages that arrive from other nodes.

    Messages for which the bus has no room are queued for each peer.
    """

    def __init__(
        self,
        bus: StreamBus | PartLink,
        receive: Receive,
        node: Node,
        emit: Emit | None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.node = node
        self.now = now
        """The clock of the record, in seconds."""
        self._bus, self._receive = bus, receive
        self._held: dict[Address, deque[Message]] = {}
        self.flight = FlightRecorder()
        """The last messages, waits and steps of this node."""
        self.runner = Runner(node, self, NodeMetrics(node.address, emit, bus.traffic), self.now)
        self.gone: set[Address] = set()
        """Lost processes; a server's program may not know of them yet, or never, if others took their place."""
        node.freeze, node.port_copies = bus.copy_for_sending, True

    @abstractmethod
    def drive(self, runner: Runner) -> None:
        """Wait for messages and deliver them, until the program no longer waits for a message."""

    def send(self, to: Address, message: Message) -> None:
        """Send a message to a peer, and wait until the bus has room for the message.

        Messages that arrive meanwhile are delivered.
        """
        nested = to in self._held  # a message that arrived while an earlier one waits for room sends more
        self.transmit(to, message)
        while to in self._held and not nested:
            if not self._bus.reachable(to):
                self.unreachable(to)
            elif (arrived := self._receive(RETRY)) is not None:
                self.take(arrived)
            self.retry()

    def transmit(self, to: Address, message: Message) -> None:
        """Send a message to a peer behind the messages that are queued for the peer, without waiting; messages to a
        lost peer are dropped.
        """
        if message.array is not None:
            message.array = to_host(message.array)
        held = self._held.get(to)
        if held is None and self._sent(to, message):
            return
        if message.array is not None:  # it may change while the message is queued
            message.array = self.node.freeze(message.array)
        self._held.setdefault(to, deque()).append(message)

    def retry(self) -> None:
        """Send queued messages until the bus has no more room for them."""
        for to, held in list(self._held.items()):
            while held and self._sent(to, held[0]):
                held.popleft()
            if not held:
                self._held.pop(to, None)

    def _sent(self, to: Address, message: Message) -> bool:
        """Try to send a message; true if it was sent, or its receiver is lost."""
        if to not in self.node.lost and to not in self.gone:
            try:
                self._bus.send(to, message)
            except PeerLost:  # slow, or disconnected: the supervisor decides whether the peer is lost
                return False
            for hook in failpoints.hooks:
                hook("message.sent")
            array = message.array
            self.flight.note("send", to, message.tag, self.node.step, 0 if array is None else array.nbytes)
        return True

    def later(self, seconds: float, message: Message) -> None:
        """Let a message of this node to itself arrive after so many seconds."""
        self._bus.later(seconds, message)

    def collect(self) -> None:
        """Deliver the messages that have arrived."""
        while (message := self._receive(0)) is not None:
            self.take(message)
        nodes.poll(self.node)

    def take(self, message: Message) -> None:
        """Deliver a message from a peer, or carry out an instruction of the supervisor.

        Raises:
            Interrupted: the supervisor ended the run.
        """
        array, launcher = message.array, message.source == LAUNCHER
        size = 0 if array is None else array.nbytes
        self.flight.note("receive", None if launcher else message.source, message.tag, self.node.step, size)
        if not launcher:
            for hook in failpoints.hooks:
                hook("message.received")
            if message.array is not None:
                message.array = to_device_of(message.array, self.node.params)
            self.runner.deliver(message)
        elif message.tag == "stop":
            raise stopped(message)
        elif message.tag == AGAIN:
            raise begin_again(message)
        elif message.tag == "lost":
            address, self.node.view = message.note.address, message.note.view
            self.gone.add(address)
            if not message.note.replaced:
                self.note_loss(address, message.note.reason)
            self._bus.disconnect(address)
            self.runner.lose(address)

    def note_loss(self, address: Address, reason: str) -> None:
        """Handle the death of a node; raise `PeerLost` if this node cannot continue without the dead node."""
        raise PeerLost(reason)

    def unreachable(self, to: Address) -> None:
        """Handle a broken connection; return once it is certain that the peer is lost and that this node can continue
        without the peer.
        """
        raise PeerLost(f"{node_name(to)} is not reachable from {node_name(self.node.address)}")
