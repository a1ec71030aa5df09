"""Runs the programs of one node, for every driver.

A program is resumed with the value that it waits for, and runs until it next waits. Drivers compute the gradients and
move the messages; they call `give`, `deliver` and `wake`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any, Protocol

from flockstep import nodes
from flockstep.arrays.namespace import copied, first_not_finite, to_device_of
from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, ConfigurationError, Diverged, FlockstepError, PeerLost, RunError
from flockstep.messages import ANYTHING, LEAVE, Address, Message, Wanted, node_name
from flockstep.nodes import BadGradients, Node, Server, Worker
from flockstep.programs import Effect, NeedGradient, Program
from flockstep.records import failpoints
from flockstep.records.events import Event
from flockstep.runtime.fault_injector import WrongGradients
from flockstep.runtime.node_metrics import NodeMetrics
from flockstep.runtime.program_restart import CHANNEL, ProgramRestart, ScriptRequests
from flockstep.runtime.replication import NOTES as BETWEEN_PROCESSES
from flockstep.runtime.settings import OPTIMIZER, taken_over
from flockstep.runtime.tape import Tape
from flockstep.runtime.tracker import Progress
from flockstep.runtime.user_code import place_of, said_of
from flockstep.strategies.base import Strategy
from flockstep.strategies.finite import bad_gradient, require_finite_message


class Replication(Protocol):
    """Handles messages between processes in a run whose servers have backups."""

    def take(self, message: Message, sent_at: float | None) -> None:
        """Handle a message from another process, which may hold a message for the program."""

    def loses(self, address: Address) -> bool:
        """Handle the death of a process; return whether the program continues without noticing the death."""

    def close(self) -> None:
        """Write the number of dropped messages to the record, because the node's program has ended."""


class Driver(Protocol):
    """Moves a node's messages: within one process, in virtual time, or between processes."""

    def send(self, to: Address, message: Message) -> None:
        """Count `message` and send it without waiting; the message's array does not change afterwards."""

    def later(self, seconds: float, message: Message) -> None:
        """Deliver a message of a node to itself after so many seconds."""

    def collect(self) -> None:
        """Deliver the messages that have arrived, without waiting."""

    def drive(self, runner: Runner) -> None:
        """Wait for messages and deliver them, until the program no longer waits for a message."""


class OneProcess:
    """Delivers the messages between nodes of one process: each message is delivered before `send` returns."""

    def __init__(self) -> None:
        self.runners: dict[Address, Runner] = {}

    def send(self, to: Address, message: Message) -> None:
        """Deliver a message to another node of this process."""
        runner = self.runners[to]
        params = runner.node.params
        if message.array is not None and type(message.array) is not type(params):
            message.array = to_device_of(message.array, params)
        runner.deliver(message)

    def later(self, seconds: float, message: Message) -> None:
        """Do nothing, because no time passes."""

    def collect(self) -> None:
        """Do nothing, because no message is ever in flight."""

    def drive(self, runner: Runner) -> None:
        """Raise an error: a message that has not arrived in one process will never arrive."""
        if type(runner.waiting) is Wanted:
            node = runner.node
            raise RunError(
                f"{node_name(node.address)} waits at step {node.run_step} for {runner.waiting}, which no node will send"
            )


Input = tuple[Any, ...]
"""An input of a program: ("message", message, time of sending), ("gradient", array, loss, first element), ("loss",
address of a dead node) or ("needless",) for a canceled gradient.
"""


@dataclass(eq=False)
class History:
    """A saved state of a node, and the inputs that its program has received since, from which the program can be
    restarted.
    """

    point: bytes = b""
    """State of the node at the last point from which its program can restart."""
    inputs: list[Input] = field(default_factory=list)
    """Inputs that the program has received since `point`."""


class Runner:
    """Runs a node's programs and keeps its metrics.

    `waiting` is the request whose answer the program awaits; None while the program runs.
    """

    __slots__ = (  # Python 3.11 looks attributes with defaults of the class, or behind 30 others, up in dicts
        "__dict__", "__weakref__", "_again", "_checked", "_checks", "_driver", "_params", "_program", "_serves",
        "_settle", "_since", "_then", "at_rest", "clock", "counted", "done", "ended", "every", "history", "metrics",
        "node", "partly", "progress", "quarantine", "recorded", "replaying", "replication", "script_requests", "send",
        "send_snapshot", "source", "stepped", "strikes", "tape", "waiting", "wrong_gradients",
    )  # fmt: skip
    send_snapshot: Callable[..., None] | None
    """Function that sends a snapshot of the node's parameters at a tick of progress; None if no snapshots are sent."""
    every: int
    """Number of steps of a worker between two ticks of progress, at which the model is evaluated; 0 for no ticks."""
    progress: Progress | None
    """Number of steps that each worker has taken, as far as a server knows; it determines when the server sends a
    snapshot.
    """
    source: Callable[[NeedGradient], None] | None
    """Function that is called when the program waits for a gradient, or for another part of a gradient."""
    stepped: Callable[[float | None], None] | None
    """Function that is called at every step of a worker, with the step's loss."""
    ended: Callable[[], None] | None
    """Function that is called when the node's program has ended."""
    script_requests: ScriptRequests | None
    """Answers a script's requests to a server, which the server's program does not see; None on workers."""
    history: History | None
    """The history from which the program can be restarted; None if no history is kept."""
    replaying: bool
    """Whether the program repeats inputs from its history, so that its requests must not take effect again."""
    counted: bool
    """Whether the step of the next gradient is in the metrics already, because it is taken again."""
    at_rest: bool
    """Whether the program has done nothing since it last reached a point from which it can restart."""

    quarantine: Callable[[Address, str], None] | None
    """Function that removes a worker from the run; its arguments are the worker's address and the reason."""
    wrong_gradients: WrongGradients | None
    """Injected faults that change the worker's gradients; None if there are none."""
    tape: Tape | None
    """Records what enters the program, or repeats what a record says; None if the run cannot be replayed."""
    replication: Replication | None
    """Handles the messages between the processes of a run whose servers have backups; None if there are no backups."""

    def __init__(self, node: Node, driver: Driver, metrics: NodeMetrics, clock: Callable[[], float]):
        self.node = node
        self._params = node.params
        self.metrics = metrics
        self.every, self.replaying, self.counted, self.at_rest = 0, False, False, False
        self.send_snapshot = self.source = self.stepped = self.ended = self.quarantine = None
        self.progress = self.script_requests = self.history = self.wrong_gradients = self.replication = None
        self.tape = None
        self.recorded = metrics.emit is not None
        self.clock = clock
        self.waiting: Effect | None = None
        self.done = False
        self.partly = 0.0
        """Share of the current gradient that the program has received; 0 if it waits for another gradient."""
        self.send = driver.send
        self._driver = driver
        self._program: Program | None = None
        self._then: Callable[[], Program] | None = None
        self._again: Callable[[], Program]
        self._since = clock()
        """Time at which the node began its current activity: computing, waiting or running."""
        self._checked = 0
        self._serves = isinstance(node, Server)
        self._settle: Callable[[], None] | None = None
        self._checks: frozenset[str] = frozenset()
        """Tags of messages whose arrays the program checks itself."""
        self.strikes: Counter[Address] = Counter()
        """Number of refused gradients of each worker."""
        node.port = self

    def begin(self, program: Program, then: Callable[[], Program] | None = None) -> None:
        """Run a program until it first waits. When the program ends, run the program that `then` creates."""
        self._program, self._then, self.done, self.partly = program, then, False, 0.0
        self._params = self.node.params
        self.resume(None)

    def serve(self, strategy: Strategy, node: Server) -> None:
        """Run a server's program; it restarts whenever a script has replaced the model."""
        self._again = lambda: strategy.master(node)
        self._checks = strategy.checks
        self.begin(self._again())

    def keep(self, tape: Tape, take: Callable[[Message], None]) -> None:
        """Tell the tape what the program asks for from now on; `take` delivers a message."""
        self.tape, send = tape, self.send
        tape.begin(self.node, take)

        def send_and_turn(to: Address, message: Message) -> None:
            send(to, message)
            tape.turn()

        self.send = send_and_turn

    def turn(self) -> None:
        """Mark that a wait inside the program has ended."""
        if self.tape is not None:
            self.tape.turn()

    def read_clock(self) -> float:
        """Return the seconds on the node's clock, for the program."""
        return self.clock() if self.tape is None else self.tape.reading(self.clock)

    def remember(self, history: History, save: Callable[[], bytes]) -> None:
        """Record the program's inputs from now on, so that the program can be restarted; `save` returns the node's
        current state.
        """

        def at_boundary() -> None:
            if not self.replaying:
                history.point = save()
                history.inputs.clear()
            elif self._settle is not None:
                self._settle()
                self._settle = None

        self.history, self.node.at_boundary = history, at_boundary
        history.point = history.point or save()

    def replay(self, inputs: Sequence[Input], begin: Callable[[], None], settle: Callable[[], None]) -> None:
        """Pass the recorded inputs to the restarted program, so that it reaches the state that it had before.

        `settle` undoes what the program changes meanwhile by starting its tasks again.
        """
        send, recorded, since = self.send, self.recorded, self._since
        self.send, self.recorded, self.replaying, self._settle = _nowhere, False, True, settle
        begin()
        for kind, *arguments in inputs:
            match kind:
                case "message":
                    self.deliver(*arguments)
                case "gradient":
                    self.give(*arguments)
                case "loss":
                    self.lose(*arguments)
                case "needless":
                    found = self.needless()
                    assert found is not None
                    self.give_up(found)
        self.send, self.recorded, self._since, self.replaying = send, recorded, since, False

    def restart_from(self, begin: Callable[[], None], settle: Callable[[], None]) -> None:
        """Run the program of a node whose state was restored, from the point at which the state was saved; `begin`
        creates the program.

        Until the program reaches the point at which its state was saved, it only starts its tasks again: nothing is
        sent or recorded, and `settle` undoes what the tasks change.
        """
        node, send, recorded = self.node, self.send, self.recorded
        at_boundary = node.at_boundary

        def reached() -> None:
            self.send, self.recorded, node.at_boundary = send, recorded, at_boundary
            settle()
            if at_boundary is not None:
                at_boundary()

        self.send, self.recorded, node.at_boundary = _nowhere, False, reached
        begin()
        if node.at_boundary is reached:
            raise RunError(f"{node_name(node.address)} cannot continue from its saved state; start the run again")

    def close(self) -> None:
        """End the program at the point where it waits."""
        if self._program is not None:
            self._program.close()
        self.waiting, self.done = None, True

    def aside(self, program: Program) -> None:
        """Run another program to completion while the node's own program waits for a gradient or has ended."""
        kept = self._program, self._then, self.waiting, self.done, self.partly
        spent = self.clock() - self._since
        self._since += spent
        try:
            self.begin(program)
            self._driver.drive(self)
        finally:
            self._program, self._then, self.waiting, self.done, self.partly = kept
            self._since = self.clock() - spent

    def advance(self, gradient: FlatArray | None = None, loss: float | None = None, whole: bool = True) -> bool:
        """Resume the program, with the gradient if the program waits for a gradient.

        Return whether the program then waits for another gradient. Unless the gradient is `whole`, only the awaited
        part is valid.
        """
        need = self.waiting
        if gradient is not None:
            if not isinstance(need, NeedGradient):
                raise RunError("a step was interrupted and cannot be resumed; start the run again")
            if need.unless is None or not self._needless():
                self.give(gradient, loss, 0 if whole else self.awaited)
        while True:
            if type(self.waiting) is not NeedGradient:
                self._driver.drive(self)
            if self.done:
                return False
            need = self.waiting
            if type(need) is not NeedGradient or need.unless is None or not self._needless():
                if gradient is None or not whole or not self.partly:
                    return True
                self.give(gradient, loss)

    @property
    def awaited(self) -> int:
        """Index of the first element of the gradient part that the program awaits; 0 if it awaits the whole
        gradient.
        """
        need = self.waiting
        return round((1 - need.share) * len(self.node.params)) if isinstance(need, NeedGradient) else 0

    @property
    def tentative(self) -> bool:
        """Whether a gradient that the program has received in parts may still change."""
        return isinstance(self.waiting, NeedGradient) and self.waiting.tentative

    def resume(self, value: Any) -> None:
        """Resume the program with the value that it waits for, until it waits again or ends."""
        if self.tape is not None:
            self.tape.turn()
        program, self.waiting, self.at_rest = self._program, None, False
        assert program is not None
        try:
            effect = program.throw(value) if isinstance(value, PeerLost) else program.send(value)
        except StopIteration:
            if self.node.params is not self._params:
                self._refuse_other_params()
            self._end()
            return
        if self.node.params is not self._params:
            self._refuse_other_params()
        if self.recorded and self.clock() > self._since:
            self.lap("comm")
        self.waiting = effect
        if type(effect) is NeedGradient:
            if self.partly or self.every or self.source is not None:
                self._need(effect)
        elif self.progress is not None or self.script_requests is not None:
            self._idle()

    def _refuse_other_params(self) -> None:
        """Raise `ConfigurationError`, because the program has assigned another array to `params`, unseen by drivers."""
        raise ConfigurationError(
            f"the strategy assigned another array to params of {node_name(self.node.address)} at step "
            f"{self.node.run_step}; write into the array, as in me.params += delta or me.params[:] = model"
        )

    def give(self, gradient: FlatArray, loss: float | None = None, begin: int = 0) -> None:
        """Resume the program with the awaited gradient, which is valid from element `begin` on.

        Raises:
            Diverged: the loss, or an element of the gradient, is not finite, and bad gradients end the run.
        """
        need, node = self.waiting, self.node
        assert isinstance(need, NeedGradient)
        assert isinstance(node, Worker)
        if self.tape is not None:
            self.tape.turn()
        if self.recorded:
            self.lap("compute")
        reason = None
        if loss is not None:
            if math.isfinite(loss) or self.replaying:
                node.loss = loss
            else:
                reason, loss = self._bad_loss(node, loss), None
        first = begin
        # Elements before `begin` were not written, and a program may have changed parts that it has received.
        end = self._checked if self.partly else need.size(len(node.params)) if need.layers else len(node.params)
        if need.tentative and begin:
            begin = end  # checked with the last part
        elif begin < end and not self.replaying:
            # The usual case, without the calls that the others need: no limit, no faults, and finite elements.
            plain = (
                reason is None and not begin and self.wrong_gradients is None and node.bad_gradients.max_norm is None
            )
            if not (plain and (node.knows_finite() or first_not_finite(gradient[begin:end]) < 0)):
                self._check(node, need, gradient, slice(begin, end), reason)
        if self.history is not None and not self.replaying:
            self.history.inputs.append(("gradient", copied(gradient), loss, first))
        self._checked, self.partly = begin, need.share if need.share < 1 else 0.0
        if need.closes and self.tape is not None:
            self.tape.gradient(loss, gradient[: need.size(len(gradient))])
        if need.closes and self.recorded:
            self._step(loss)
        self.resume(gradient)

    def _bad_loss(self, node: Worker, loss: float) -> str:
        """Return why the gradient of a loss that is not finite is refused.

        Raises:
            Diverged: bad gradients end the run, or no later gradient of the worker can be finite.
        """
        what = f"the loss of {node_name(node.address)} is {loss} at step {node.run_step}"
        if node.bad_gradients.action == "stop":
            raise Diverged(f"{what}; lower the learning rate{_now(node)}")
        if node.bad_gradients.action == "skip" and first_not_finite(node.params) >= 0:
            raise Diverged(f"{what}, and its parameters are not finite either; lower the learning rate{_now(node)}")
        return f"{what}; lower the learning rate, or fix the samples or the loss"

    def _check(
        self, node: Worker, need: NeedGradient, gradient: FlatArray, part: slice, reason: str | None = None
    ) -> None:
        """Check a part of the worker's own gradient before the program sees it; zeros take the place of a bad one.

        `reason`: why the gradient is refused whatever its elements; None if they decide.

        Raises:
            Diverged: the gradient is bad, and bad gradients end the run.
            CompositionError: the program uses parts of a gradient before the whole is known to be good.
        """
        if self.wrong_gradients is not None:
            if need.layers:
                raise CompositionError(
                    "wrong gradients cannot be injected into factors; use ps in place of factor_server"
                )
            self.wrong_gradients.change(gradient, node.step, part, hostile=False)
        if part.start > 0 and node.bad_gradients != BadGradients():
            raise CompositionError(
                f"on_bad_gradient={node.bad_gradients.action} and max_gradient_norm need whole gradients, and this "
                "strategy sends the first parts of a gradient before the last are computed; use all_reduce, or "
                "on_bad_gradient=stop"
            )
        known = self.wrong_gradients is None and node.knows_finite()
        reason = reason or bad_gradient(node, gradient, part.start, part.stop, bool(need.layers), known)
        if reason is not None:
            node.refuse(node.address, reason)
            gradient[part] = 0
            node.revised = node.revised or need.tentative
        if self.wrong_gradients is not None:
            self.wrong_gradients.change(gradient, node.step, part, hostile=True)

    def needless(self) -> Message | None:
        """Return the message that makes the awaited gradient unnecessary, if it has arrived; otherwise None."""
        need = self.waiting
        if not isinstance(need, NeedGradient) or need.unless is None:
            return None
        return self.node.mailbox.take(Wanted(need.unless))

    def give_up(self, found: Message) -> None:
        """Resume the program with the message that made its gradient unnecessary."""
        if self.history is not None and not self.replaying:
            self.history.inputs.append(("needless",))
        self.partly = 0.0
        if self.recorded:
            self.lap("compute")
            self._step(None)
        self.resume(found)

    def deliver(self, message: Message, sent_at: float | None = None) -> None:
        """Handle a message that has arrived; `sent_at` is the time of sending, if known."""
        if self.replication is not None and message.tag in BETWEEN_PROCESSES:
            self.replication.take(message, sent_at)
            return
        node = self.node
        if self.history is not None and not self.replaying:
            self.history.inputs.append(("message", message, sent_at))
        if self._serves:
            if (
                self.script_requests is not None
                and message.tag.endswith(CHANNEL)
                and self.script_requests.hears(message)
            ):
                self._attend()
                return
            if message.array is not None and message.tag not in self._checks:
                require_finite_message(node, message, message.array)
            if self.progress is not None:
                self.progress.heard(message)
            if message.tag == OPTIMIZER and isinstance(node, Server) and taken_over(node, message):
                node.mailbox.hear(message)
                return
        waiting = self.waiting
        if (  # nothing that lies in the mailbox is what the program waits for, so this need not either
            type(waiting) is Wanted
            and (waiting.reply_to or 0) == message.reply_to
            and (waiting.tag is None or waiting.tag == message.tag)
            and (waiting.source is None or waiting.source == message.source)
            and message.tag != LEAVE
            and not node.tasks
            and (self.script_requests is None or not self.script_requests.stopped)
        ):
            node.mailbox.hear(message)
            self.go_on(message, sent_at)
        else:
            nodes.deliver(node, message)
            if type(self.waiting) is Wanted or self.script_requests is not None:
                self.wake(sent_at)

    def lose(self, address: Address) -> None:
        """Handle the death of a node."""
        if self.replication is None or not self.replication.loses(address):
            self.take_loss(address)

    def take_loss(self, address: Address) -> None:
        """Tell the node's program that another node has died."""
        if self.history is not None and not self.replaying:
            self.history.inputs.append(("loss", address))
        nodes.lose(self.node, address)
        self.wake()

    def wake(self, sent_at: float | None = None) -> None:
        """Resume the program if the awaited message has arrived, or can no longer arrive."""
        waiting = self.waiting
        if type(waiting) is Wanted and (self.script_requests is None or not self.script_requests.stopped):
            found: Message | PeerLost | None = self.node.mailbox.take(waiting)
            if found is None and waiting.source in self.node.departed:
                found = nodes.missed(self.node, waiting)
            if found is not None:
                self.go_on(found, sent_at)
                return
        self._attend()

    def go_on(self, value: Message | PeerLost | None, sent_at: float | None = None) -> None:
        """Resume the program with the awaited message; the time until the message was sent counts as waiting, the time
        from then until it arrived as communication.
        """
        if not self.recorded:
            pass
        elif sent_at is None:
            self.lap("wait")
        else:
            now = self.clock()
            if now > self._since:
                self.metrics.waited_for(self._since, sent_at, now)
                self._since = now
        self.resume(value)

    def later(self, seconds: float, message: Message) -> None:
        """Let a message of the node to itself arrive after so many seconds; in a replay it is among the inputs."""
        if not self.replaying:
            self._driver.later(seconds, message)

    def collect(self) -> None:
        """Deliver the messages that have arrived."""
        self._driver.collect()
        self.turn()

    def emit(self, event: Event) -> None:
        """Write an event to the record."""
        if self.recorded and self.metrics.emit is not None:
            self.metrics.emit(event)

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        """Record updates that took effect on this node."""
        for hook in failpoints.hooks:
            hook("update.applied")
        if self.recorded:
            self.metrics.updates(self.clock(), source, count, staleness, weight)

    def refused(self, source: Address, reason: str) -> None:
        """Record that a gradient was refused; after a number of refused gradients, the worker is removed from the
        run.
        """
        if self.replaying:
            return
        if self.recorded:
            self.metrics.refused(self.clock(), source, reason)
        policy = self.node.bad_gradients
        self.strikes[source] += 1
        if policy.action == "quarantine" and self.strikes[source] == policy.strikes and self.quarantine is not None:
            self.quarantine(
                source, f"{node_name(source)} is in quarantine after {policy.strikes} bad gradients: {reason}"
            )

    def scalar(self, name: str, value: float) -> None:
        """Write to the record a named number that the strategy reports."""
        if self.recorded:
            self.metrics.scalar(self.clock(), name, value)

    def _end(self) -> None:
        """Handle the end of a program."""
        if self.recorded:
            self.lap("comm")
        if self._then is not None:
            self._program, self._then = self._then(), None
            self.resume(None)
            return
        self.done = True
        if self.script_requests is not None:
            self.script_requests.end()
        if self.ended is not None:
            self.ended()

    def _need(self, need: NeedGradient) -> None:
        """Handle a program's request for a gradient."""
        if self.partly and not self.partly < need.share:
            self.partly = 0.0
        every, step = self.every, self.node.step
        if every and step % every == 0 and not self.partly and self.send_snapshot and self.recorded:
            self.send_snapshot(step // every)
        if self.source is not None:
            self.source(need)

    def _needless(self) -> bool:
        """Cancel the awaited gradient if it is needless, and resume the program; return whether that was done."""
        self.collect()
        found = self.needless()
        if found is not None:
            self.give_up(found)
        return found is not None

    def _step(self, loss: float | None) -> None:
        if not self.counted:
            self.metrics.step(self._since, loss)
        self.counted = False
        if self.stepped is not None:
            self.stepped(loss)

    def _idle(self) -> None:
        """While a server waits, send due snapshots and answer requests."""
        if self.progress is not None and self.send_snapshot is not None and self.recorded:
            while (tick := self.progress.due()) is not None:
                self.send_snapshot(tick)
        if self.script_requests is not None and self.script_requests.asked:
            self._attend()

    def _attend(self) -> None:
        if self.script_requests is None or self.waiting is None or not self.script_requests.asked:
            return
        try:
            self.script_requests.attend(idle=self.waiting == ANYTHING)
        except ProgramRestart:
            self.close()
            self.script_requests.restart()
            self.begin(self._again())

    def lap(self, kind: str) -> None:
        """Count the time since the previous call as `kind` (compute, wait or comm), without the time spent waiting in
        shared memory.
        """
        now, since, metrics = self.clock(), self._since, self.metrics
        if now > since:
            slept = metrics.waited and min(metrics.waited, now - since)
            metrics.spent(kind, since, now - slept)
            if slept:
                metrics.waited = 0.0
                metrics.spent("wait", now - slept, now)
        self._since = now


def _now(node: Worker) -> str:
    """The learning rate for a message, if it is known."""
    return "" if math.isnan(node.stepper.lr) else f", now {node.stepper.lr:g}"


def _nowhere(to: Address, message: Message) -> None:
    """Drop a message that is sent again in a replay; it arrived before."""


@contextmanager
def reporting_users_errors(what: str = "the simulation") -> Iterator[None]:
    """Context manager of a run in virtual time that reports an error in the user's own files as a real run does.

    `what` names the computation in the message if no node's program has raised the error.

    Errors of the operating system are raised unchanged: a command reports them with a way out.

    Raises:
        RunError: code in a file of the user raised an error; the message names the file and the line.
    """
    try:
        yield
    except (FlockstepError, OSError):
        raise
    except Exception as error:
        if not place_of(error):
            raise
        raise RunError(said_of(error, _source_of(error) or what)) from error


def _source_of(error: Exception) -> str:
    """The node whose program has raised an error, with the node's step; empty if no program has."""
    selves = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    running = [one.node for one in selves if isinstance(one, Runner)]
    return f"{node_name(running[-1].address)} at step {running[-1].run_step}" if running else ""
