"""A node's place in a simulation, and the events that concern it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.account import Account
from flockstep.messages import HEADER_BYTES, Address, Message, Wanted
from flockstep.nodes import Node
from flockstep.optimizers.base import OptimizerState
from flockstep.programs import NeedGradient, Program
from flockstep.simulation.network import Transit
from flockstep.workloads.sampler import SamplerState


class Host(Protocol):
    """What a seat needs of its simulation."""

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""

    def send(self, to: Address, message: Message) -> None:
        """Put a message on the virtual network."""


@dataclass(slots=True)
class Arrival:
    """Event: a message reaches its next hop, or its receiver."""

    transit: Transit
    message: Message
    sent_at: float


@dataclass(slots=True)
class Ready:
    """Event: a worker's gradient is due, or the share of it that was asked for; void if that was given up."""

    seat: Seat
    need: NeedGradient
    began: float
    """When the whole gradient was begun."""
    started: float
    """Since when the worker waits for this share."""
    finish: float
    void: bool = False


@dataclass(frozen=True)
class Saved:
    """Everything of a node that must survive a restart: all that its program may rely on between two steps."""

    params: FlatArray
    step: int
    state: Any
    random: dict[str, Any]
    optimizer: OptimizerState
    version: int
    batches: dict[int, tuple[SamplerState, int]]


class Seat:
    """A node, its program, and the driver's side of both."""

    def __init__(self, simulation: Host, account: Account):
        self.account = account
        self.waiting: Wanted | None = None
        self.computing: Ready | None = None
        self.blocked_at = 0.0
        self.done = False
        self.dead = False
        self.node: Node
        self.program: Program
        self._simulation = simulation

    def send(self, to: Address, message: Message) -> None:
        """Hand a message to the virtual network."""
        self.account.traffic.sent(message, HEADER_BYTES)
        self._simulation.send(to, message)

    def collect(self) -> None:
        """Nothing to do: what has arrived by now is in the mailbox already."""

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        """Write to the record."""
        self.account.updates(self._simulation.now, source, count, staleness, weight)

    def figure(self, name: str, value: float) -> None:
        """Write to the record."""
        self.account.figure(self._simulation.now, name, value)


FORWARD = 1 / 3
"""Share of a gradient's time that goes by before backward begins: backward does about twice the work."""


def due(began: float, finish: float, share: float) -> float:
    """When that share of the gradient, counted from the end of the flat array, is complete."""
    return finish if share >= 1 else began + (finish - began) * (FORWARD + (1 - FORWARD) * share)


def doing(seat: Seat) -> str:
    """What a node was about, for a message."""
    return f"at step {seat.node.step} " + (f"waited for {seat.waiting}" if seat.waiting else "could not go on")
