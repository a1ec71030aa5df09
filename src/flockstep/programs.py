"""Programs of nodes: coroutines that are suspended where time passes. The module also has the requests for which a
program may wait, and the interface of a driver.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from flockstep.arrays.factors import FactoredWeight, Packing
from flockstep.arrays.namespace import empty
from flockstep.errors import FlockstepError
from flockstep.messages import Address, Array, Mailbox, Message, Wanted


@dataclass(frozen=True, slots=True)
class NeedGradient:
    """A worker program's request for a gradient, for which the program waits."""

    unless: str | None = None
    """Tag of a message that cancels the request if the message arrives first; the program then receives the message."""
    share: float = 1.0
    """Share of the gradient for which the program waits, counted from the end of the flat array, where the backward
    pass begins.
    """
    block: int | None = None
    """Rank of the worker whose part of the data contains the batch; None for the requesting worker's own part."""
    turn: int | None = None
    """Index of the batch in the data of worker `block`, from 0; None for the next batch."""
    samples: tuple[int, int] | None = None
    """Range of training samples to use instead of a batch: the first sample, and the end of the range (exclusive)."""
    teachers: tuple[Array, ...] = ()
    """Parameters of the teacher models, whose mean prediction the gradient's objective includes as a second target."""
    weight: float = 0.0
    """Weight of the distance to the teachers' mean prediction in the objective, relative to the loss."""
    layers: tuple[FactoredWeight, ...] = ()
    """Layers whose gradients are requested as factors."""
    tentative: bool = False
    """Whether a script may still change parts of the gradient that it has passed on, until it passes on the last part.
    The whole gradient is checked at the last part.
    """
    closes: bool = True
    """Whether the step ends with this gradient.

    A step may take several gradients; the last gradient, or a canceled gradient, ends it.
    """

    def size(self, elements: int) -> int:
        """Return the number of valid elements in the answer for a model of `elements` parameters, which depends on the
        factored layers.
        """
        return Packing(elements, self.layers).size if self.layers else elements


class Work(Protocol):
    """The interface of an operation whose end is not signaled by a message, such as an all-reduce of another
    library.
    """

    def done(self) -> bool:
        """Whether the operation has succeeded."""

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the operation; return whether it has ended.

        Raises:
            PeerLost: the operation failed.
        """


@dataclass(frozen=True, slots=True)
class NeedWork:
    """A program's request to wait for the end of an operation that sends no message."""

    work: Work


GRADIENT = NeedGradient()
Again = Literal["never", "replayed", "afresh"]
"""Way in which a restarted program starts a background task again: "replayed" with the task's earlier messages,
"afresh" without messages, "never" not at all.
"""
Effect = NeedGradient | Wanted | NeedWork
Program = Coroutine[Effect, Any, None]


@types.coroutine
def suspend(effect: Effect) -> Generator[Effect, Any, Any]:
    """Suspend the program with a request to the driver, and return the value with which the driver resumes the
    program.
    """
    return (yield effect)


async def completed(work: Work) -> None:
    """Wait until an operation that sends no message has ended."""
    if not work.done():
        await suspend(NeedWork(work))


class Task:
    """A coroutine of a node that runs in the background whenever its messages arrive, even while a gradient is
    computed.

    The task's messages use a separate channel, so sender and receiver must start the task with the same name.
    """

    def __init__(self, number: int, channel: str, program: Coroutine[Effect, Any, Any], again: Again = "never"):
        self.number = number
        self.channel = channel
        self.again = again
        self.done = False
        self.result: Any = None
        self.wanted: Wanted | None = None
        self.work: Work | None = None
        """The operation that the task waits for instead of a message."""
        self._program = program

    def take(self, mailbox: Mailbox) -> Message | None:
        """Return the message for which the task waits, if the message has arrived; None while the task runs."""
        return None if self.wanted is None else mailbox.take(self.wanted)

    def resume(self, message: Message | None) -> None:
        """Run the task until its next wait, or to its end."""
        self._go_on(self._program.send, message)

    def close(self) -> None:
        """End the task at the point that it has reached."""
        self._program.close()

    def fail(self, error: FlockstepError) -> None:
        """Raise `error` in the task at the point where it waits. If the task does not handle the error, the driver
        receives it.
        """
        self._go_on(self._program.throw, error)

    def _go_on(self, step: Callable[[Any], Effect], value: Any) -> None:
        self.wanted = self.work = None
        try:
            effect = step(value)
        except StopIteration as end:
            self.done, self.result = True, end.value
            return
        if isinstance(effect, NeedGradient):
            raise TypeError("a background task cannot request a gradient; request gradients in the worker's program")
        if isinstance(effect, NeedWork):
            self.work = effect.work
        else:
            self.wanted = effect


class Closing(Protocol):
    """A resource that must be closed at the end of a run."""

    def close(self, failed: bool) -> None:
        """Close the resource. If the run has failed, operations may still be in progress."""


@dataclass(eq=False)
class Rendezvous:
    """Opens resources that the workers of a run share, such as shared memory. Each worker is a separate process."""

    run: str
    """Unique name of the run."""
    folder: Path
    """Path of the folder of the record; the folder of the sockets cannot be used, because it is removed once all
    sockets are connected.
    """
    rank: int
    workers: int
    attend: Callable[[Work], None]
    """Function that waits for an operation at any point of a program, and meanwhile handles the supervisor's
    messages.
    """
    moved: Callable[[int, int, int], None]
    """Function that records traffic without messages: the bytes sent and received, which a formula gives, and an
    equivalent number of messages in each direction.
    """
    held: dict[str, Closing] = field(default_factory=dict)
    """Name → shared resource, which is closed at the end of the run."""

    def close(self, failed: bool = False) -> None:
        """Release all resources that the workers share."""
        while self.held:
            self.held.popitem()[1].close(failed)


class Port(Protocol):
    """The interface of a driver to a node: sends and receives the node's messages, and writes its record."""

    def read_clock(self) -> float:
        """Return the seconds on the node's clock."""

    def turn(self) -> None:
        """Mark that a wait inside the program has ended."""

    def send(self, to: Address, message: Message) -> None:
        """Send `message` without waiting; its array must not change afterwards."""

    def later(self, seconds: float, message: Message) -> None:
        """Let a message of the node to itself arrive after so many seconds."""

    def collect(self) -> None:
        """Put the messages that have arrived into the node's mailbox, without waiting."""

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        """Record updates that took effect on this node. A source of None stands for every other worker."""

    def refused(self, source: Address, reason: str) -> None:
        """Record that a gradient of a worker was refused. The run may remove a worker after a number of refused
        gradients.
        """

    def scalar(self, name: str, value: float) -> None:
        """Write a scalar figure of the strategy to the record."""


class ParameterGuard(Protocol):
    """The interface of a check that finds writes to the parameters by code outside of the strategy, and values that are
    not finite.
    """

    def check(self) -> None:
        """Raise `ConfigurationError` if the model has changed since the last call of `note`."""

    def require_own_steps(self) -> None:
        """Raise `ConfigurationError` if another optimizer has trained the model since the last call of `note`."""

    def note(self) -> None:
        """Accept the current values of the parameters as the strategy's own."""

    def not_finite(self) -> str | None:
        """Return the name of the first tensor that contained NaN or infinity at the last call of `note`; None if all
        values were finite.
        """


class Stepper(Protocol):
    """The interface of a worker's own optimizer, of any framework."""

    @property
    def lr(self) -> float:
        """Learning rate of the optimizer's next step."""

    @property
    def settings(self) -> tuple[str, list[dict[str, Any]]]:
        """Class of the optimizer, and name → value of the settings of each of its parameter groups for the next step,
        as far as they can be compared with those of other workers.
        """

    def step(self, params: Array, gradient: Array, in_place: bool = False) -> None:
        """Update `params` (K,) in place with `gradient` (K,).

        `in_place`: the array of the gradient may be used and changed until the next gradient is complete.
        """

    def reset(self, params: Array) -> None:
        """Reset momentum and all other state to the state before the first step on `params`."""


@dataclass(frozen=True)
class HostArrays:
    """The arrays of all workers of a host that lie at the same position of the workers' shared memory."""

    offset: int
    """Number of bytes between the start of a worker's region of shared memory and its array."""
    arrays: Sequence[Array]
    """The array of each worker of the host, in order of rank."""


class SharedArrays:
    """Arrays in memory that a worker shares with other workers of its host, and sums of such arrays.

    This class shares no memory. Drivers set subclasses, which share the memory of all workers of the run, or of this
    host's. Methods that sum or exchange must be called at the same point by all workers that share the memory; in a
    background task they sum nothing, because they wait.
    """

    covers_run: ClassVar[bool] = False
    """Whether all workers of the run share the memory."""

    def all_reduce(self, array: Array, divisor: int = 1) -> bool:
        """Replace `array` with the sum over all workers of the run, divided by `divisor`, added in the order of a ring
        all-reduce; return False if it cannot be summed in shared memory.
        """
        return False

    def mean_of_slice(self, array: Array) -> Array | None:
        """Return the mean over all workers of the run of slice `rank` of `array`, added in order of rank; None if it
        cannot be summed in shared memory.

        The slices are `slices(len(array), workers)`. `array` must not change before `exchange_slices`, which must
        follow, and the caller may change the result until then.
        """
        return None

    def exchange_slices(self, own: Array, into: Array) -> None:
        """Copy slice `own` of this worker's parameters to `into` (K,) on all other workers, and their slices to `into`
        on this worker.
        """
        raise AssertionError("only slices of `mean_of_slice` are exchanged")

    def reduce_scatter(self, array: Array, shares: int) -> Array | None:
        """Sum `array` over this host's workers of a run with several hosts; each of the first `shares` workers receives
        the sum of one share.

        The shares are `slices(len(array), shares)`. Returns the array in shared memory that holds this worker's share
        of the sum, which may be `array`; None if it cannot be summed in shared memory. A call of `all_gather` must
        follow.
        """
        return None

    def all_gather(self, summed: Array, array: Array, shares: int) -> None:
        """Write the shares of all workers of this host to `array`; `reduce_scatter` returned `summed`."""
        raise AssertionError("only shares of `reduce_scatter` are gathered")

    def corresponding(self, array: Array) -> HostArrays | None:
        """Return the arrays of this host's workers, in order of rank, at the place of `array` in shared memory; None if
        `array` is not in shared memory, or the run has one host.

        Workers must agree by messages when each may read or write the other arrays.
        """
        return None

    def count(self, array: Array, shares: int) -> None:
        """Count the bytes that workers have exchanged through `corresponding` arrays, in `shares` shares, as sent."""
        raise AssertionError("only `corresponding` arrays are counted")

    def empty(self, size: int, like: Array) -> Array:
        """Return an array (size,) of the dtype of `like`, in the memory of this host if the run has several hosts.

        In shared memory, calls with equal size and dtype return the same array; all workers of the host must make the
        same calls.
        """
        return empty(like, size)
