"""An asynchronous parameter server whose epochs end before the slowest is done."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN, searched
from flockstep.messages import BYE, MASTER, Message, Note, Notes
from flockstep.nodes import Server, Worker
from flockstep.strategies.access import Pushed
from flockstep.strategies.base import Cell, Strategy, Traits
from flockstep.strategies.consistency import Push
from flockstep.strategies.rules.base import Rule
from flockstep.strategies.rules.plain import Plain


class Batch(Pushed, frozen=True):
    """Beside a gradient: also its epoch, and that it is batch `turn` of so many that the worker has in it."""

    epoch: int
    batches: int
    turn: int


class Current(Note, frozen=True):
    """Beside parameters: their version, and the epoch that the server is in."""

    version: int
    epoch: int


@dataclass
class Reader:
    """What a worker remembers: which epoch it is in, how many of its batches it has used, and the version it has."""

    epoch: int = 0
    turn: int = 0
    version: int = 0


@dataclass
class Epochs:
    """What the server remembers: the epoch, how many of its gradients are in, and who waits for its end."""

    rule: Any
    live: int
    epoch: int = 0
    count: int = 0
    waiting: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class EpochServer(Strategy):
    """Asynchronous SGD with Project Adam's end of epoch (Chilimbi et al. 2014; Langer et al. 2020, section 3.3.3).

    In an epoch each worker has `length` batches of its own, and waits at their end for the others; but the epoch is
    over as soon as `share` of everyone's have been applied: the rest of the slow ones' batches is left out. A gradient
    under way is still applied, and counts for nothing. share = 1 waits for everyone. Where workers die, the epoch ends
    with what the others can give.
    """

    notes: ClassVar[Notes] = {"push": Batch, "reply to push": Current}

    share: float = field(default=0.75, metadata=SHOWN | searched(0.25, 1.0, whole=False, log=False))
    length: int = field(default=10, metadata=SHOWN | searched(2, 64))
    rule: Rule = field(default_factory=Plain)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigurationError(f"share must be in (0, 1], got {self.share}; Project Adam's is 0.75")
        if self.length < 1:
            raise ConfigurationError(f"length must be >= 1 steps, got {self.length}; use a pass over a worker's data")

    # Asynchronous within an epoch; some batches are never used.
    traits = Traits(4, True, ("server", "mean", "rank0", "best"), True, fixed_steps=False, needs_job=True)
    cell = Cell("central", "async", "ad hoc", "single PS")
    servers = 1

    def worker_state(self, me: Worker) -> Reader:
        """Before the first batch."""
        return Reader()

    def master_state(self, me: Server) -> Epochs:
        """Before the first gradient."""
        return Epochs(self.rule.start(me), me.cluster.workers)

    async def worker(self, me: Worker) -> None:
        """Use the batches of this epoch until it is over."""
        state: Reader = me.state
        while me.training and (left := self._batches(me, state.epoch)):
            gradient = await me.gradient_of(me.rank, turn=state.epoch * self.length + state.turn)
            state.turn += 1
            note = Batch(state.version, me.lr, state.epoch, left, state.turn)
            reply = await me.ask(MASTER, "push", gradient, note)  # type: ignore[arg-type]
            me.params[:] = reply.payload
            state.version = reply.note.version
            if reply.note.epoch > state.epoch:
                state.epoch, state.turn = reply.note.epoch, 0

    def _batches(self, me: Worker, epoch: int) -> int:
        """How many batches a worker has in that epoch; the last may be shorter."""
        steps = me.steps or 0
        return max(0, min(self.length, steps - epoch * self.length))

    async def master(self, me: Server) -> None:
        """Apply at once; answer who has more to do in this epoch, and everyone when it ends."""
        state: Epochs = me.state
        async for message in me.messages():
            if message.tag == "push":
                self._push(me, state, message)
            elif message.tag == BYE and message.source in me.lost:
                state.live -= 1
                state.waiting = [asked for asked in state.waiting if asked.source != message.source]
            if state.waiting and len(state.waiting) >= state.live:
                self._end(me, state)

    def _push(self, me: Server, state: Epochs, message: Message) -> None:
        note, rank = message.note, message.source
        push = Push(rank, message.step - 1, note.version, note.lr, message.payload)
        late, [weight] = me.version - note.version, self.rule.apply(me, state.rule, [push])
        me.record_update(rank, late, weight=weight)
        current = note.epoch == state.epoch
        state.count += current
        if state.count >= math.ceil(self.share * note.batches * me.cluster.workers - 1e-9):
            self._end(me, state)
        if current and note.epoch == state.epoch and note.turn == note.batches:
            state.waiting.append(message)
        else:
            self._answer(me, state, message)

    def _end(self, me: Server, state: Epochs) -> None:
        state.epoch, state.count = state.epoch + 1, 0
        for asked in state.waiting:
            self._answer(me, state, asked)
        state.waiting = []

    def _answer(self, me: Server, state: Epochs, message: Message) -> None:
        self.rule.read(me, state.rule, message.source)
        me.reply(message, me.params, Current(me.version, state.epoch))
