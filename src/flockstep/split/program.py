"""The base of the programs that compute the parts of a split model, and the runner that executes them in every driver.

A part belongs to a worker. Its program answers the strategy's requests for a gradient: by passes, whose time the driver
provides, and by messages to the other parts of the same replica.
"""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, RunError
from flockstep.frameworks.base import Indices
from flockstep.messages import PART, Address, AnyNote, Array, Mailbox, Message, Wanted, frozen
from flockstep.nodes import Hosts
from flockstep.partitions.base import Partition
from flockstep.programs import NeedGradient, Rendezvous, SharedArrays
from flockstep.split.stages import HeldPart
from flockstep.strategies.base import Strategy

STREAM = 0x57A6E
"""Number in the seed of the parts' random generators that separates them from the nodes' generators."""


@dataclass(frozen=True, slots=True)
class NeedPass:
    """Request of a part for the time of a pass; the driver resumes the part when this time has passed."""

    step: int
    """Number of the step to which the pass belongs."""
    share: float
    """Duration of the pass over a whole batch, as a fraction of the duration of a gradient of the whole model."""
    samples: int
    """Number of samples of the pass."""


@dataclass(frozen=True, slots=True)
class NeedRequest:
    """Request of a part to wait for its worker's next gradient request, after it has answered the last one."""


PartEffect = Wanted | NeedPass | NeedRequest
Send = Callable[[int, Message], None]


@dataclass(frozen=True)
class PartRun:
    """Place of a part in its run, and the functions that the driver provides for the part's program."""

    rank: int
    """Number of the replica."""
    number: int
    """Number of the part in its replica."""
    steps: int
    """Number of steps of the run."""
    batch: Callable[[], Indices]
    """Function that returns the samples of the replica's next batch, which are equal for all parts of the replica."""
    send: Send
    """Function (part, message) that sends a message to another part of this replica."""
    seed: int = 0
    taken: int = 0
    """Number of steps before the run was continued from a checkpoint; no message was in flight then."""
    name: str = "part"
    """Name of the part for the user."""

    def random(self, step: int) -> np.random.Generator:
        """Return the generator of a step for the random choices of codecs and collectives, the same in all drivers."""
        return np.random.default_rng(np.random.SeedSequence((self.seed, STREAM, self.rank, self.number, step)))


class PartProgram(ABC):
    """The program of one part of one replica. Messages between the parts are addressed by the number of the part."""

    def __init__(self, run: PartRun, part: HeldPart):
        """Create a program, whose first parameters `requested` gives; `part`: the framework's side."""
        self.rank, self.number, self.name, self._run = run.rank, run.number, run.name, run
        self.mailbox = Mailbox()
        self.gradient: FlatArray = np.zeros(part.schema.size, part.schema.dtype)
        """Gradient (K,) of the current step; complete when the program waits for a request."""
        self.loss = 0.0
        """Mean loss of the batch of the current step."""

    @abstractmethod
    def requested(self, params: FlatArray) -> None:
        """Copy the worker's parameters (K,), because they may change after its strategy has requested a gradient."""

    @abstractmethod
    async def program(self) -> None:
        """Compute all passes of the part, step by step, until the run ends."""


class PartRunner:
    """Runs the program of a part; a driver delivers its messages, ends its passes, and takes its gradients."""

    def __init__(
        self, part: PartProgram, begin: Callable[[NeedPass], None], answer: Callable[[FlatArray, float], None]
    ) -> None:
        """`begin`: called when a pass begins; `passed` must be called at its end, after `begin` has returned. `answer`:
        called with the gradient and the loss of each step.
        """
        self.part = part
        self.waiting: PartEffect | None = None
        self._begin, self._answer = begin, answer
        self._program: Coroutine[PartEffect, Message | None, None] = part.program()
        self.done = False
        self._resume(None)

    def request(self, params: FlatArray) -> None:
        """Start the next step with the worker's parameters (K,); raise `RunError` after the last step."""
        if isinstance(self.waiting, NeedRequest) and not self.done:
            self.part.requested(params)
            self._resume(None)
            if not self.done:
                return
        raise RunError(f"{self.part.name} has no further step, but its worker requests a gradient; start the run again")

    def deliver(self, message: Message) -> None:
        """Handle a message from another part of the replica."""
        self.part.mailbox.put(message)
        if isinstance(self.waiting, Wanted):
            self._look()

    def passed(self) -> None:
        """Continue the part's program after a pass, because the duration of the pass has elapsed."""
        self._resume(None)

    def close(self) -> None:
        """End the part's program at its current point."""
        self._program.close()
        self.waiting, self.done = None, True

    def _look(self) -> None:
        """Resume the part if the message that it waits for has arrived."""
        assert isinstance(self.waiting, Wanted)
        found = self.part.mailbox.take(self.waiting)
        if found is not None:
            self._resume(found)

    def _resume(self, value: Message | None) -> None:
        began = self.waiting is not None
        try:
            self.waiting = effect = self._program.send(value)
        except StopIteration:
            self.done = True
            return
        if isinstance(effect, Wanted):
            self._look()
        elif isinstance(effect, NeedPass):
            self._begin(effect)
        elif began:
            self._answer(self.part.gradient, self.part.loss)


def require_plain(need: NeedGradient, strategy: Strategy, partition: Partition) -> None:
    """Raise `CompositionError` if a program requests more than the gradient of its next batch."""
    if need.unless or need.samples or need.teachers or need.block is not None or need.turn is not None:
        raise CompositionError(
            f"{strategy} requests more than the gradient of the worker's next batch, which the parts of {partition} do "
            "not compute; use partition=none, or a strategy such as local_sgd"
        )


@types.coroutine
def resumed(effect: PartEffect) -> Generator[PartEffect, Any, Any]:
    """Let the runner carry out an effect of a part's program, and return the value that it resumes with."""
    return (yield effect)


class Ways:
    """One part of a replica as a member of the group of all parts, which sums arrays by messages."""

    def __init__(self, workers: int, run: PartRun, mailbox: Mailbox) -> None:
        """Create the member that `run` places in a group of `workers` parts; messages arrive in `mailbox`."""
        self.rank, self.workers, self.random = run.number, workers, run.random(run.taken)
        self.hosts: Hosts = (tuple(range(workers)),)
        self.rendezvous: Rendezvous | None = None
        self.shared = SharedArrays()
        self._run, self._mailbox = run, mailbox

    def send(self, to: Address, tag: str, array: Array | None = None, note: AnyNote | None = None) -> None:
        """Send a message to another part; the array is copied."""
        copy = None if array is None else frozen(array)
        self._run.send(to, Message(PART + self.rank, tag, copy, {} if note is None else note))

    def send_all(
        self, to: Iterable[Address], tag: str, array: Array | None = None, note: AnyNote | None = None
    ) -> None:
        """Send one message to each of several parts."""
        for rank in to:
            self.send(rank, tag, array, note)

    async def receive(self, tag: str, source: Address) -> Message:
        """Return the next message with the given tag from another part."""
        message: Message = await resumed(Wanted(tag, PART + source))
        self.require_all(source)
        return message

    async def receive_array(self, tag: str, source: Address, into: Array | None = None) -> Array:
        """Return the array of the next message with this tag from another part, stored in `into` if given."""
        array = (await self.receive(tag, source)).payload
        if into is None:
            return array
        into[:] = array
        return into

    def require_all(self, source: Address) -> None:
        """Check that no message from another part was lost."""
        self._mailbox.require_all(PART + source)
