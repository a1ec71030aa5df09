"""Training by clients: a server gives tasks to some of them, and each sends what its local steps have changed."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flockstep import registry
from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, require
from flockstep.expression import SHOWN
from flockstep.messages import LEAVE, MASTER, Message, Note, Notes
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.client_samplings.base import Clients, ClientSampling
from flockstep.strategies.client_samplings.uniform import Uniform
from flockstep.strategies.drifts.base import Drift
from flockstep.strategies.drifts.uncorrected import Uncorrected
from flockstep.strategies.outer_optimizers.average import Average
from flockstep.strategies.outer_optimizers.base import OuterOptimizer
from flockstep.strategies.resizing import Resizing


class ClientData(Note, frozen=True):
    """Note of a client's first message: its number of training samples, and the number of steps granted to it."""

    samples: int
    steps: int


class LocalTask(Note, frozen=True):
    """Note sent with the model: the number of the round, the number of local steps, and the last round in which the
    server has used a change of this client (0: none). Without steps, the run is over.
    """

    round: int
    steps: int
    counted: int = 0


class Trained(Note, frozen=True):
    """Note sent with a change: its round, the number of local steps, their mean loss, and their length as the drift
    correction counts it.
    """

    round: int
    steps: int
    loss: float
    length: float


@dataclass
class ClientState:
    """A client's state: the task in hand, and what the drift correction remembers between rounds."""

    drift: Any = None
    introduced: bool = False
    over: bool = False
    round: int = 0
    left: int = 0
    """Number of local steps that are left in the round; 0 if no task is in hand."""
    steps: int = 0
    loss: float = 0.0
    """Sum of the losses of the round's steps."""
    begun: float = 0.0
    model: FlatArray | None = None
    """The parameters (K,) from which the round has begun; None if no task is in hand."""


@dataclass
class TaskState:
    """What a server knows of its clients and tasks, whatever it makes of the changes."""

    outer_state: Any
    drift: Any
    clients: Clients = field(default_factory=Clients)
    met: int = 0
    """Number of clients that have introduced themselves, or died before."""
    granted: int = 0
    """Number of local steps granted to all clients together."""
    taken: int = 0
    over: bool = False


@dataclass(frozen=True)
class ClientTraining(Strategy):
    """Base of the strategies in which a server gives tasks to clients with data of their own.

    `participants`, a share of the clients below 1 or a number, train at a time; `sampling` chooses them. A task is
    `period` local steps, or `epochs` passes over the client's samples, from the server's model with a new optimizer; a
    client that has trained for `seconds` sends what it has. `drift` corrects the local steps where clients' data
    differ. All clients together take the steps that are granted to all.
    """

    notes: ClassVar[Notes] = {"here": ClientData, "task": LocalTask, "change": Trained}

    participants: float = field(default=0.1, metadata=SHOWN)
    period: int = field(default=10, metadata=SHOWN)
    epochs: float | None = None
    sampling: ClientSampling = field(default_factory=Uniform)
    drift: Drift = field(default_factory=Uncorrected)
    outer_optimizer: OuterOptimizer = field(default_factory=Average)
    seconds: float = math.inf

    def __post_init__(self) -> None:
        whole = self.participants >= 1 and self.participants % 1 == 0
        rule = "a share in (0, 1) or a whole number of clients"
        require(0 < self.participants < 1 or whole, "participants", rule, self.participants, "use for example 0.1")
        require(self.period >= 1, "period", ">= 1 local steps", self.period, "10 is usual")
        if self.epochs is not None:
            require(0 < self.epochs < math.inf, "epochs", "> 0 and finite", self.epochs, "leave it out for `period`")
        require(self.seconds > 0, "seconds", "> 0", self.seconds, "leave it out for no limit")

    traits = Traits("partial", True, ("server",), fixed_steps=False, needs_job=True, served=True)
    servers = 1
    resizing = Resizing(refused="the server plans the steps of all clients when the run begins")

    def wanted(self, clients: int) -> int:
        """Return the number of clients that train at a time in a run with the given number of clients."""
        return max(1, round(self.participants * clients)) if self.participants < 1 else int(self.participants)

    def check(self, workers: int) -> None:
        allowed, wanted = f"<= the {workers} workers, which are the clients", self.wanted(workers)
        require(wanted <= workers, "participants", allowed, wanted, "lower it, or start more workers")

    def largest_message(self, nbytes: int) -> int:
        return self.drift.models * nbytes

    def worker_state(self, me: Worker) -> ClientState:
        return ClientState(self.drift.client_state(me))

    async def worker(self, me: Worker) -> None:
        """Carry out the server's tasks, one local step after the other, until the run is over."""
        state: ClientState = me.state
        if not state.introduced:
            state.introduced = True
            me.send(MASTER, "here", None, ClientData(me.samples, me.steps or 0))
        while not state.over:
            me.boundary()
            if state.model is None:
                self._begin(me, state, await me.receive("task", MASTER))
                continue
            gradient = await me.gradient()
            me.optimizer_step(self.drift.corrected(gradient, me.params, state.model, state.drift))
            state.steps, state.left, state.loss = state.steps + 1, state.left - 1, state.loss + me.loss
            late = self.seconds < math.inf and me.now() - state.begun >= self.seconds
            if late or not state.left:
                self._send(me, state, state.model)

    def _begin(self, me: Worker, state: ClientState, task: Message) -> None:
        """Begin a task at the server's model."""
        note = task.note
        if not note.steps:
            state.over = True
            return
        epochs = None if self.epochs is None else math.ceil(self.epochs * me.samples / me.batch)
        state.round, state.left, state.steps, state.loss = note.round, epochs or note.steps, 0, 0.0
        state.begun = me.now() if self.seconds < math.inf else 0.0
        me.params[:] = state.model = self.drift.received(task.payload, len(me.params), note.counted, state.drift)
        me.stepper.reset(me.params)

    def change(self, me: Worker, model: FlatArray, state: ClientState) -> FlatArray:
        """Return what a client sends at the end of a task that has begun at `model` (K,)."""
        return self.drift.change(me, model, state.steps, state.round, state.drift)

    def _send(self, me: Worker, state: ClientState, model: FlatArray) -> None:
        """Send what the task's steps have changed."""
        change = self.change(me, model, state)
        note = Trained(state.round, state.steps, state.loss / state.steps, self.drift.length(me, state.steps))
        me.send(MASTER, "change", change, note)
        state.model, state.left = None, 0

    def hear(self, me: Server, state: TaskState, message: Message) -> None:
        """Note what a client's message says of it."""
        note, rank = message.note, message.source
        if message.tag == "here":
            state.met += 1
            state.granted += note.steps
            state.clients.add(rank, note.samples)
        elif message.tag == "change":
            state.taken += note.steps
            state.clients.heard(rank, note.round, note.loss, me.now())
        elif message.tag == LEAVE:
            state.met += rank not in state.clients.samples and rank in me.lost
            state.clients.remove(rank)

    def send_tasks(self, me: Server, state: TaskState, ranks: Iterable[int], number: int) -> None:
        """Send the model to clients without a task; `number` of the round, or version of the model."""
        model, now, clients = me.freeze(self.drift.sent(me.params, state.drift)), me.now(), state.clients
        for rank in ranks:
            me.send(rank, "task", model, LocalTask(number, self.period, clients.counted.get(rank, 0)))
            clients.busy[rank] = now

    def end(self, me: Server, state: TaskState) -> None:
        """Tell all clients that the run is over."""
        state.over = True
        me.send_all(state.clients.samples, "task", None, LocalTask(0, 0))

    def move(self, me: Server, state: TaskState, change: FlatArray) -> None:
        """Move the model by the mean change (K,) of clients."""
        self.outer_optimizer.move(me.params, me.params + change, state.outer_state)
        me.version += 1
        me.step = state.taken // me.cluster.workers


@dataclass(frozen=True)
class AsynchronousTraining(ClientTraining):
    """Base of the strategies in which clients train at any time: when one has sent its change, another one begins at
    the current model.
    """

    taxonomy_entry = TaxonomyEntry("decentral", "async", "ad hoc", "single PS")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drift.by_round:
            raise CompositionError(
                f"{self.drift} counts rounds that all participants begin at one model, and clients of "
                f"{registry.name_of(type(self))} begin at any time; use drift=prox, or federated"
            )

    async def master(self, me: Server) -> None:
        """Use each change as it arrives, and give another client a task."""
        state: TaskState = me.state
        async for message in me.messages():
            self.hear(me, state, message)
            if message.tag == "change":
                self.use(me, state, message)
            if state.met == me.cluster.workers and not state.over:
                self._give_tasks(me, state)

    @abstractmethod
    def use(self, me: Server, state: Any, message: Message) -> None:
        """Use a change, computed from version `message.note.round` of the model."""

    def _give_tasks(self, me: Server, state: TaskState) -> None:
        """Give tasks to as many clients as may train at a time, or end the run."""
        clients = state.clients
        free = self.wanted(me.cluster.workers) - len(clients.busy)
        if state.taken < state.granted:
            if free > 0:
                self.send_tasks(me, state, self.sampling.choose(me.random, clients, free), me.version)
        elif not clients.busy:
            self.end(me, state)
