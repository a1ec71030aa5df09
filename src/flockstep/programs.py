"""What a program is: a coroutine that is suspended where time passes; what it may wait for, and who runs it."""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from flockstep.arrays.factors import Layer, Packing
from flockstep.errors import FlockstepError
from flockstep.messages import Address, Array, Mailbox, Message, Wanted


@dataclass(frozen=True, slots=True)
class NeedGradient:
    """What a suspended worker waits for when it asked for a gradient."""

    unless: str | None = None
    """Give up when a message with that tag is here first; the worker is handed the message."""
    share: float = 1.0
    """Wait for this share of the gradient only, counted from the end of the flat array, where backward begins."""
    block: int | None = None
    """Use a batch of that worker's part of the data; None: of one's own."""
    turn: int | None = None
    """Which batch of it, from 0; None: the next one."""
    samples: tuple[int, int] | None = None
    """Use these training samples, first and one past the last, instead of a batch."""
    teachers: tuple[Array, ...] = ()
    """Also draw the predictions towards the mean prediction of these models."""
    weight: float = 0.0
    """How much that counts beside the loss."""
    layers: tuple[Layer, ...] = ()
    """Give the gradients of these layers as factors."""
    closes: bool = True
    """The step ends with it. A step may take several gradients; the last one closes it, or the one given up."""

    def size(self, elements: int) -> int:
        """Elements that are set in the answer for a model of `elements` parameters: others where layers are factors."""
        return Packing(elements, self.layers).size if self.layers else elements


class Work(Protocol):
    """Something that goes on by itself and ends without a message, such as another library's all-reduce."""

    def done(self) -> bool:
        """Whether it has succeeded by now."""

    def wait(self, seconds: float) -> bool:
        """Whether it has ended within that time.

        Raises:
            PeerLost: it failed.
        """


@dataclass(frozen=True, slots=True)
class NeedWork:
    """What a program waits for that is no message."""

    work: Work


GRADIENT = NeedGradient()
Again = Literal["never", "replayed", "afresh"]
"""Whether a program that begins anew begins a background task again, and how that comes to where it was."""
Effect = NeedGradient | Wanted | NeedWork
Program = Coroutine[Effect, Any, None]


@types.coroutine
def suspend(effect: Effect) -> Generator[Effect, Any, Any]:
    """Hand an effect to the driver; what it resumes the program with."""
    return (yield effect)


async def completed(work: Work) -> None:
    """Wait until something that goes on outside of messages is done."""
    if not work.done():
        await suspend(NeedWork(work))


class Task:
    """A coroutine that goes on in the background whenever what it waits for arrives, also while a gradient is computed.

    Its messages travel in a channel of their own: both ends must start it under the same name.
    """

    def __init__(self, number: int, channel: str, program: Coroutine[Effect, Any, Any], again: Again = "never"):
        self.number = number
        self.channel = channel
        self.again = again
        self.done = False
        self.result: Any = None
        self.wanted: Wanted | None = None
        self.work: Work | None = None
        """What it waits for instead of a message."""
        self._program = program

    def take(self, mailbox: Mailbox) -> Message | None:
        """The message that it waits for, if it is here; None while it runs."""
        return None if self.wanted is None else mailbox.take(self.wanted)

    def resume(self, message: Message | None) -> None:
        """Run it up to the next message or work that it waits for, or to its end."""
        self.wanted = self.work = None
        try:
            effect = self._program.send(message)
        except StopIteration as end:
            self.done, self.result = True, end.value
            return
        self._wait_for(effect)

    def close(self) -> None:
        """End it where it is."""
        self._program.close()

    def fail(self, error: FlockstepError) -> None:
        """Raise `error` where it waits; what it does not handle goes on to the driver."""
        self.wanted = self.work = None
        try:
            effect = self._program.throw(error)
        except StopIteration as end:
            self.done, self.result = True, end.value
            return
        self._wait_for(effect)

    def _wait_for(self, effect: Effect) -> None:
        if isinstance(effect, NeedGradient):
            raise TypeError("a background task cannot ask for a gradient; ask in the worker's program")
        if isinstance(effect, NeedWork):
            self.work = effect.work
        else:
            self.wanted = effect


class Closing(Protocol):
    """What has to be closed when a run ends."""

    def close(self, failed: bool) -> None:
        """The run is over; it may have failed with work under way."""


@dataclass(eq=False)
class Rendezvous:
    """Where the workers of one run, each in a process of its own, find each other outside of messages."""

    run: str
    """Its name, that no other run has."""
    folder: Path
    """Its record's; the sockets' own folder is gone once all are connected."""
    rank: int
    workers: int
    attend: Callable[[Work], None]
    """Waits for work at once, wherever a program is, and still hears what the supervisor says."""
    moved: Callable[[int, int, int], None]
    """Books bytes sent and received outside of messages by formula, and as how many messages each way they count."""
    held: dict[str, Closing] = field(default_factory=dict)
    """What they have opened together, closed at the end of the run."""

    def close(self, failed: bool = False) -> None:
        """Close all that is held."""
        while self.held:
            self.held.popitem()[1].close(failed)


class Port(Protocol):
    """A driver's side of a node: moves its messages and keeps its record."""

    def send(self, to: Address, message: Message) -> None:
        """Take `message`, whose array will not change any more; does not wait."""

    def collect(self) -> None:
        """Put what has arrived by now into the mailbox; does not wait."""

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        """Note that updates took effect here (source None: from every other worker)."""

    def figure(self, name: str, value: float) -> None:
        """Note a figure of the strategy's own."""


class Watch(Protocol):
    """Looks whether somebody else writes to the parameters, and whether they are finite."""

    def check(self) -> None:
        """Raise `ConfigurationError` if the model is not what it was at the last `note`."""

    def note(self) -> None:
        """Take the model as it is now for right."""

    def not_finite(self) -> str | None:
        """Name of the first tensor that was not finite at the last `note`."""


class Stepper(Protocol):
    """A worker's own optimiser, whoever wrote it."""

    lr: float

    def step(self, params: Array, gradient: Array) -> None:
        """Update `params` in place."""

    def reset(self, params: Array) -> None:
        """Forget momentum and all other state, as before the first step on `params`."""


class SharedSum(Protocol):
    """The workers of one host, who share memory."""

    def all_reduce(self, array: Array, divisor: int = 1) -> bool:
        """Replace `array` by the sum over all workers, divided; waits. False: it cannot be had this way."""
