"""An asynchronous parameter server whose epochs may end before the slowest workers have finished."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flockstep.errors import ConfigurationError, require
from flockstep.expression import SHOWN
from flockstep.messages import LEAVE, MASTER, Message, Note, Notes
from flockstep.nodes import Server, Worker
from flockstep.strategies.access import Pushed
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits, check_replicas
from flockstep.strategies.consistency import Push
from flockstep.strategies.server_updates.base import ServerUpdate
from flockstep.strategies.server_updates.plain import Plain


class EpochBatch(Pushed, frozen=True):
    """Note sent with a gradient: the epoch, the number of batches that the worker has in the epoch, and the number of
    the gradient's batch.
    """

    epoch: int
    batches: int
    turn: int


class Current(Note, frozen=True):
    """Note sent with parameters: their version, and the server's current epoch."""

    version: int
    epoch: int


@dataclass
class Reader:
    """A worker's state: its current epoch, the number of batches that it has used in the epoch, and the version of its
    parameters.
    """

    epoch: int = 0
    turn: int = 0
    version: int = 0


@dataclass
class EpochServerState:
    """The server's state: the current epoch, the number of gradients received in the epoch, and the pushes to answer at
    the end of the epoch.
    """

    update_state: Any
    live: int
    epoch: int = 0
    count: int = 0
    waiting: list[Message] = field(default_factory=list)


@dataclass(frozen=True)
class EpochServer(Strategy):
    """Asynchronous SGD with Project Adam's end of epoch (Chilimbi et al. 2014; Langer et al. 2020, section 3.3.3).

    In an epoch each worker has `length` batches, and then waits for the end of the epoch. The epoch ends as soon as the
    fraction `share` of all workers' batches has been applied; the remaining batches of slow workers are skipped. A
    gradient in transit at the end of its epoch is still applied, but does not count for the next epoch. With share = 1
    the epoch ends when all workers have finished. If workers die, the epoch ends when all live workers are waiting.
    `replicas` is the number of backups of the server.
    """

    notes: ClassVar[Notes] = {"push": EpochBatch, "reply to push": Current}

    share: float = field(default=0.75, metadata=SHOWN)
    length: int = field(default=10, metadata=SHOWN)
    server_update: ServerUpdate = field(default_factory=Plain)
    replicas: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_replicas(self.replicas)
        require(0 < self.share <= 1, "share", "in (0, 1]", self.share, "Project Adam uses 0.75")
        if self.length < 1:
            raise ConfigurationError(
                f"length must be >= 1 steps, got {self.length}; use the number of steps in one pass over a "
                "worker's data"
            )

    # Asynchronous within an epoch; some batches are never used.
    traits = Traits(
        "partial",
        True,
        ("server", "mean", "rank0", "best"),
        True,
        fixed_steps=False,
        needs_job=True,
        plain_gradients=False,
        own_rates=True,
    )
    taxonomy_entry = TaxonomyEntry("central", "async", "ad hoc", "single PS")
    servers = 1

    def worker_state(self, me: Worker) -> Reader:
        return Reader()

    def master_state(self, me: Server) -> EpochServerState:
        return EpochServerState(self.server_update.start(me), me.cluster.workers)

    async def worker(self, me: Worker) -> None:
        """Use the batches of the server's current epoch, one push each, until the worker's steps are used up."""
        state: Reader = me.state
        while me.training and (left := self._batches(me, state.epoch)):
            gradient = await me.gradient_of(me.rank, turn=state.epoch * self.length + state.turn)
            state.turn += 1
            note = EpochBatch(state.version, me.lr, state.epoch, left, state.turn)
            reply = await me.ask(MASTER, "push", gradient, note)  # type: ignore[arg-type]
            me.params[:] = reply.payload
            state.version = reply.note.version
            if reply.note.epoch > state.epoch:
                state.epoch, state.turn = reply.note.epoch, 0

    def _batches(self, me: Worker, epoch: int) -> int:
        """Return the number of the worker's batches in the given epoch; the last epoch may be shorter."""
        steps = me.steps or 0
        return max(0, min(self.length, steps - epoch * self.length))

    async def master(self, me: Server) -> None:
        """Apply every gradient on arrival. Answer at once the workers that still have batches, and the other workers
        when the epoch ends.
        """
        state: EpochServerState = me.state
        async for message in me.messages():
            if message.tag == "push":
                self._push(me, state, message)
            elif message.tag == LEAVE and message.source in me.lost:
                state.live -= 1
                state.waiting = [asked for asked in state.waiting if asked.source != message.source]
            if state.waiting and len(state.waiting) >= state.live:
                self._end(me, state)

    def _push(self, me: Server, state: EpochServerState, message: Message) -> None:
        note, rank = message.note, message.source
        push = Push(rank, message.step - 1, note.version, note.lr, message.payload)
        late, [weight] = me.version - note.version, self.server_update.apply(me, state.update_state, [push])
        me.record_update(rank, late, weight=weight)
        current = note.epoch == state.epoch
        state.count += current
        if state.count >= math.ceil(self.share * note.batches * me.cluster.workers - 1e-9):
            self._end(me, state)
        if current and note.epoch == state.epoch and note.turn == note.batches:
            state.waiting.append(message)
        else:
            self._answer(me, state, message)

    def _end(self, me: Server, state: EpochServerState) -> None:
        state.epoch, state.count = state.epoch + 1, 0
        for asked in state.waiting:
            self._answer(me, state, asked)
        state.waiting = []

    def _answer(self, me: Server, state: EpochServerState, message: Message) -> None:
        self.server_update.read(me, state.update_state, message.source)
        me.reply(message, me.params, Current(me.version, state.epoch))
