"""Runs the programs of one node, wherever it is and whatever moves its messages.

A program is resumed with what it waits for, and runs until it next waits. Who computes a gradient and what brings
messages is for others to say: they call `give`, `deliver` and `wake`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flockstep.arrays.namespace import beside, copied
from flockstep.arrays.schema import FlatArray
from flockstep.drivers.account import Account
from flockstep.drivers.renewal import CHANNEL, Reception, Renewed
from flockstep.drivers.settings import OPTIMIZER, taken_over
from flockstep.drivers.tracker import Progress
from flockstep.errors import Diverged, PeerLost, RunError
from flockstep.messages import ANYTHING, BYE, Address, Message, Wanted, node_name
from flockstep.nodes import Node, Server, Worker
from flockstep.programs import Effect, NeedGradient, Program
from flockstep.strategies.base import Strategy
from flockstep.strategies.finite import require_finite_gradient, require_finite_message


class Driver(Protocol):
    """Moves a node's messages: in this process, in virtual time, or between processes."""

    def send(self, to: Address, message: Message) -> None:
        """Take `message`, whose array will not change any more, and count it; does not wait."""

    def collect(self) -> None:
        """Deliver what has arrived by now; does not wait."""

    def drive(self, runner: Runner) -> None:
        """Deliver messages, waiting for them, until the program waits for none."""


class OneProcess:
    """Moves messages between the nodes of one process: each is delivered before `send` returns."""

    def __init__(self) -> None:
        self.runners: dict[Address, Runner] = {}

    def send(self, to: Address, message: Message) -> None:
        """Deliver it."""
        runner = self.runners[to]
        if message.array is not None:
            message.array = beside(message.array, runner.node.params)
        runner.deliver(message)

    def collect(self) -> None:
        """Nothing is ever on its way."""

    def drive(self, runner: Runner) -> None:
        """The message must be here already, or it will never come."""
        if type(runner.waiting) is Wanted:
            node = runner.node
            raise RunError(
                f"{node_name(node.address)} waits for {runner.waiting} at step {node.run_step}, which nobody will send"
            )


Input = tuple[Any, ...]
"""What a program has been given: ("message", message, when it was sent), ("gradient", array, loss, first element),
("loss", address of a dead node) or ("needless",) for a gradient that was given up."""


@dataclass(eq=False)
class History:
    """What it takes to begin a program anew."""

    point: bytes = b""
    """The node's state where its program could last have begun anew."""
    inputs: list[Input] = field(default_factory=list)
    """What it has been given since."""


class Runner:
    """Runs a node's programs, and keeps its books. `waiting` is what its program waits for; None while it runs."""

    hand_in: Callable[[float], None] | None = None
    """Takes the node's parameters to be evaluated at that tick of progress."""
    every = 0
    """Steps of a worker between two ticks; 0: there are none."""
    progress: Progress | None = None
    """When a server's ticks are due."""
    source: Callable[[NeedGradient], None] | None = None
    """Told that the program waits for a gradient, or for more of one."""
    stepped: Callable[[float | None], None] | None = None
    """Told of every step of a worker, with its loss."""
    ended: Callable[[], None] | None = None
    """Told that the program has ended."""
    reception: Reception | None = None
    """What a server of a script answers besides its program."""
    history: History | None = None
    """What it takes to begin the program anew; None: nobody keeps it."""
    replaying: bool = False
    """It goes through what happened already: nothing that the program asks for now is to be done again."""

    def __init__(self, node: Node, driver: Driver, account: Account, clock: Callable[[], float]):
        self.node = node
        self.account = account
        self.recorded = account.emit is not None
        self.clock = clock
        self.waiting: Effect | None = None
        self.done = False
        self.partly = 0.0
        """Which share the program has had of the gradient that it goes on to wait for; 0: it waits for another one."""
        self.send = driver.send
        self._driver = driver
        self._program: Program | None = None
        self._then: Callable[[], Program] | None = None
        self._again: Callable[[], Program]
        self._since = clock()
        """When the node began to compute, to wait or to run, whichever it does."""
        self._checked = 0
        self._settle: Callable[[], None] | None = None
        node.port = self

    def begin(self, program: Program, then: Callable[[], Program] | None = None) -> None:
        """Run a program until it first waits; at its end, the one that `then` makes."""
        self._program, self._then, self.done, self.partly = program, then, False, 0.0
        self.resume(None)

    def serve(self, strategy: Strategy, node: Server) -> None:
        """Run a server's program, again from its beginning whenever a script has replaced the model."""
        self._again = lambda: strategy.master(node)
        self.begin(self._again())

    def remember(self, history: History, save: Callable[[], bytes]) -> None:
        """Keep from now on what it takes to begin the program anew; `save` gives the node's state as it is."""

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
        """Go on where a runner was that had these inputs since the node's state was saved, which it has again.

        `settle` puts right what the program has changed until it comes to where it was: by beginning tasks again.
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

    def close(self) -> None:
        """End the program where it is."""
        if self._program is not None:
            self._program.close()
        self.waiting, self.done = None, True

    def aside(self, program: Program) -> None:
        """Run another program to its end while the node's own waits for a gradient, or has ended."""
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
        """Hand over the gradient that is waited for, if there is one, and go on; whether another one is waited for.

        Of one that is not `whole`, only the part that is waited for is there.
        """
        need = self.waiting
        if gradient is not None:
            if not isinstance(need, NeedGradient):
                raise RunError("a step was interrupted in its middle, and cannot be gone on with; start the run again")
            if need.unless is None or not self._needless():
                self.give(gradient, loss, 0 if whole else self.awaited)
        self._driver.drive(self)
        while not self.done:
            need = self.waiting
            if type(need) is not NeedGradient or need.unless is None or not self._needless():
                if gradient is None or not whole or not self.partly:
                    return True
                self.give(gradient, loss)
            self._driver.drive(self)
        return False

    @property
    def awaited(self) -> int:
        """The first element of the part of the gradient that is waited for; 0: it is the whole."""
        need = self.waiting
        return round((1 - need.share) * len(self.node.params)) if isinstance(need, NeedGradient) else 0

    def resume(self, value: Any) -> None:
        """Let the program go on with what it has waited for, until it waits again or ends."""
        program, self.waiting = self._program, None
        assert program is not None
        try:
            effect = program.throw(value) if isinstance(value, PeerLost) else program.send(value)
        except StopIteration:
            self._end()
            return
        if self.recorded and self.clock() > self._since:
            self._lap("comm")
        self.waiting = effect
        if type(effect) is NeedGradient:
            if self.partly or self.every or self.source is not None:
                self._need(effect)
        elif self.progress is not None or self.reception is not None:
            self._idle()

    def give(self, gradient: FlatArray, loss: float | None = None, begin: int = 0) -> None:
        """Resume the program with the gradient that it waits for, which is there from element `begin` on.

        Raises:
            Diverged: the loss, or an element of the gradient, is not finite.
        """
        need, node = self.waiting, self.node
        if self.history is not None and not self.replaying:
            self.history.inputs.append(("gradient", copied(gradient), loss, begin))
        assert isinstance(need, NeedGradient)
        assert isinstance(node, Worker)
        if self.recorded:
            self._lap("compute")
        if loss is not None:
            if not math.isfinite(loss):
                raise Diverged(
                    f"the loss of {node_name(node.address)} is {loss} at step {node.run_step}; lower the learning "
                    f"rate, now {node.lr:g}"
                )
            node.loss = loss
        # What lies behind the size was never written, and a program may have changed the parts that it has had.
        end = self._checked if self.partly else need.size(len(node.params)) if need.layers else len(node.params)
        if begin < end:
            require_finite_gradient(node, gradient, begin, end)
        self._checked, self.partly = begin, need.share if need.share < 1 else 0.0
        if need.closes and self.recorded:
            self._step(loss)
        self.resume(gradient)

    def needless(self) -> Message | None:
        """The message that makes the gradient needless that is waited for, if it is here."""
        need = self.waiting
        if not isinstance(need, NeedGradient) or need.unless is None:
            return None
        return self.node.mailbox.take(Wanted(need.unless))

    def give_up(self, found: Message) -> None:
        """Resume the program with the message that makes its gradient needless."""
        if self.history is not None and not self.replaying:
            self.history.inputs.append(("needless",))
        self.partly = 0.0
        if self.recorded:
            self._lap("compute")
            self._step(None)
        self.resume(found)

    def deliver(self, message: Message, sent_at: float | None = None) -> None:
        """A message has arrived; `sent_at` is when it was sent, where that is known."""
        node = self.node
        if self.history is not None and not self.replaying:
            self.history.inputs.append(("message", message, sent_at))
        if isinstance(node, Server):
            if self.reception is not None and message.tag.endswith(CHANNEL) and self.reception.hears(message):
                self._attend()
                return
            if message.array is not None:
                require_finite_message(node, message)
            if self.progress is not None:
                self.progress.heard(message)
            if message.tag == OPTIMIZER and taken_over(node, message):
                return
        waiting = self.waiting
        if (  # nothing that lies in the mailbox is what the program waits for, so this need not either
            type(waiting) is Wanted
            and (waiting.reply_to or 0) == message.reply_to
            and (waiting.tag is None or waiting.tag == message.tag)
            and (waiting.source is None or waiting.source == message.source)
            and message.tag != BYE
            and not node.tasks
            and (self.reception is None or not self.reception.stopped)
        ):
            node.mailbox.hear(message)
            self.go_on(message, sent_at)
        else:
            node.deliver(message)
            if self.waiting is not None:
                self.wake(sent_at)

    def lose(self, address: Address) -> None:
        """That node is dead."""
        if self.history is not None and not self.replaying:
            self.history.inputs.append(("loss", address))
        self.node.lose(address)
        self.wake()

    def wake(self, sent_at: float | None = None) -> None:
        """Let the program go on if the message that it waits for is here, or cannot come any more."""
        waiting = self.waiting
        if type(waiting) is Wanted and (self.reception is None or not self.reception.stopped):
            found: Message | PeerLost | None = self.node.mailbox.take(waiting)
            if found is None and waiting.source in self.node.departed:
                found = self.node.missed(waiting)
            if found is not None:
                self.go_on(found, sent_at)
                return
        self._attend()

    def go_on(self, value: Message | PeerLost | None, sent_at: float | None = None) -> None:
        """Resume the program after it has waited: for its message to be sent, then for it to come."""
        if not self.recorded:
            pass
        elif sent_at is None:
            self._lap("wait")
        else:
            now = self.clock()
            if now > self._since:
                self.account.waited_for(self._since, sent_at, now)
                self._since = now
        self.resume(value)

    def collect(self) -> None:
        """Deliver what has arrived by now."""
        self._driver.collect()

    def updates(self, source: Address | None, count: int, staleness: int | None, weight: float | None = None) -> None:
        """Write to the record."""
        if self.recorded:
            self.account.updates(self.clock(), source, count, staleness, weight)

    def figure(self, name: str, value: float) -> None:
        """Write to the record."""
        if self.recorded:
            self.account.figure(self.clock(), name, value)

    def _end(self) -> None:
        """A program has ended."""
        if self.recorded:
            self._lap("comm")
        if self._then is not None:
            self._program, self._then = self._then(), None
            self.resume(None)
            return
        self.done = True
        if self.reception is not None:
            self.reception.end()
        if self.ended is not None:
            self.ended()

    def _need(self, need: NeedGradient) -> None:
        """The program waits for a gradient."""
        if not self.partly < need.share:
            self.partly = 0.0
        if self.every and not self.partly and self.hand_in and self.recorded and self.node.step % self.every == 0:
            self.hand_in(self.node.step // self.every)
        if self.source is not None:
            self.source(need)

    def _needless(self) -> bool:
        """Whether the gradient that is waited for is not needed any more; then the program has gone on."""
        self._driver.collect()
        found = self.needless()
        if found is not None:
            self.give_up(found)
        return found is not None

    def _step(self, loss: float | None) -> None:
        self.account.step(self._since, loss)
        if self.stepped is not None:
            self.stepped(loss)

    def _idle(self) -> None:
        """A server waits: it hands in its parameters if an evaluation is due, and answers what is asked besides."""
        if self.progress is not None and self.hand_in is not None and self.recorded:
            for tick in self.progress.due():
                self.hand_in(tick)
        if self.reception is not None:
            self._attend()

    def _attend(self) -> None:
        if self.reception is None or self.waiting is None or not self.reception.asked:
            return
        try:
            self.reception.attend(idle=self.waiting == ANYTHING)
        except Renewed:
            self.close()
            self.reception.renew()
            self.begin(self._again())

    def _lap(self, kind: str) -> None:
        """What began last was of that kind, but for what the node slept for others in memory that they share."""
        now, since, account = self.clock(), self._since, self.account
        if now > since:
            slept, account.waited = min(account.waited, now - since), 0.0
            account.spent(kind, since, now - slept)
            if slept:
                account.spent("wait", now - slept, now)
        self._since = now


def _nowhere(to: Address, message: Message) -> None:
    """What is sent again has arrived long ago."""
