"""All programs of a run in one process, in virtual time.

Gradients are real: computed on real data at each replica's own parameters. Only time is modelled. A gradient that is
asked for at t is a function of the parameters at t, so it may be computed at any moment before it is due; the pending
requests of all workers are computed together when the first of them is due.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.account import Account, Emit
from flockstep.drivers.mishaps import Death, Mishaps, Narrowing
from flockstep.drivers.plan import Batches, LocalOptimizer, Plan, computed
from flockstep.drivers.pool import ROWS, GradientPool
from flockstep.drivers.seats import FORWARD, Arrival, Ready, Saved, Seat, doing, due
from flockstep.drivers.tracker import FINAL, Progress, Tracker
from flockstep.errors import Diverged, PeerLost, RunError
from flockstep.frameworks.base import Engine, Indices
from flockstep.messages import HEADER_BYTES, Address, Message, Wanted, node_name, server
from flockstep.nodes import Node, Server, Worker
from flockstep.programs import GRADIENT, Effect, NeedGradient, NeedWork
from flockstep.records.events import Lost
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.faults import Fault
from flockstep.simulation.network import Network
from flockstep.simulation.queue import EventQueue
from flockstep.strategies.base import Strategy
from flockstep.strategies.finite import require_finite_gradient, require_finite_message


class Simulation:
    """One run in virtual time. `run` returns when every program has ended; times are virtual seconds."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        compute: ComputeModel,
        network: Network,
        emit: Emit,
        progress: Callable[[int, float], None] | None = None,
        resume: Mapping[Address, Saved] | None = None,
        faults: Sequence[Fault] = (),
    ):
        n = plan.cluster.workers
        self.plan = plan
        self.tracker = Tracker(engine, plan.result, plan.cluster, plan.held(engine.schema.size), plan.samples_at, emit)
        self._engine = engine
        self._emit = emit
        self._report = progress
        self._queue: EventQueue[Arrival | Ready | Death | Narrowing] = EventQueue()
        self._mishaps = Mishaps(faults, plan.cluster)
        self._clock = self._mishaps.clock(compute.start(n, plan.seed))
        self._fabric = network.start(plan.cluster)
        for t, narrow in reversed(self._mishaps.narrowings()):  # whether they can be, and those there from the start
            self._fabric.narrow(narrow.node, plan.cluster.addresses, 1.0 if t else narrow.factor)
        self._params = np.tile(engine.initial(), (n, 1))
        self._gradients = GradientPool(engine.schema.size, self._params.dtype)
        self._losses = np.zeros(n)
        self._indices: list[Indices] = [np.zeros(0, np.int64)] * n
        self._pending: set[int] = set()
        self._batches = [Batches(plan, rank) for rank in range(n)]
        self._steps = 0
        self._progress = {server(i): Progress(plan.cluster, plan.evaluate_every) for i in range(plan.cluster.servers)}
        self._steppers: dict[int, LocalOptimizer] = {}
        self.seats: dict[Address, Seat] = {}
        for rank in range(n):
            self._seat_worker(rank)
        for index in range(plan.cluster.servers):
            self._seat_server(index, engine.initial())
        for address, saved in (resume or {}).items():
            self._restore(self.seats[address], saved)

    @property
    def now(self) -> float:
        """The virtual time, in seconds."""
        return self._queue.now

    def run(self) -> None:
        """Run every program to its end.

        Raises:
            Diverged: a loss is not finite.
            RunError: the programs wait for each other for ever.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows shows as a loss that is not finite
            for address in (*self._progress, *range(self.plan.cluster.workers)):
                self._resume(self.seats[address], None)
            for t, narrowing in self._mishaps.narrowings():
                self._queue.schedule(t, narrowing)
            for t, death in self._mishaps.deaths():
                self._queue.schedule(t, death)
            while self._queue:
                self._handle(self._queue.pop()[1])
        stuck = [seat for seat in self.seats.values() if not seat.done]
        if stuck:
            waits = "; ".join(f"{node_name(s.node.address)} for {s.waiting} at step {s.node.step}" for s in stuck[:4])
            raise RunError(f"deadlock: every program waits for a message that nobody will send: {waits}")
        self.tracker.close()

    def stop(self) -> None:
        """End every program where it is, and write each node's totals."""
        for seat in self.seats.values():
            if not seat.done:
                seat.program.close()
                seat.done, seat.waiting = True, None
                seat.account.close(self.now, seat.node.params)

    def _handle(self, event: Arrival | Ready | Death | Narrowing) -> None:
        if isinstance(event, Ready):
            self._gradient_due(event)
        elif isinstance(event, Death):
            (self._notice if event.noticed else self._die)(event.node)
        elif isinstance(event, Narrowing):
            self._fabric.narrow(event.node, self.plan.cluster.addresses, event.factor)
        elif event.transit.done:
            self._deliver(event)
        else:
            self._fabric.advance(event.transit)
            self._forward(event)

    def send(self, to: Address, message: Message) -> None:
        """Put a message on the virtual network."""
        if self._mishaps.lost(to, message):
            return
        nbytes = message.payload_bytes + HEADER_BYTES
        transit = self._fabric.depart(message.source, to, nbytes, self._queue.now)
        self._forward(Arrival(transit, message, self._queue.now))

    def _seat_worker(self, rank: int) -> None:
        plan, params = self.plan, self._params[rank]
        seat = self.seats[rank] = Seat(self, Account(rank, self._emit))
        stepper = self._steppers[rank] = LocalOptimizer(plan.optimizer, params, self._engine.schema.slices)
        stepper.lr = plan.lr_at(0)
        facts = plan.optimizer, self._engine.train_size, self._engine.schema.slices
        worker = Worker(rank, plan.cluster, params, seat, plan.random(rank), stepper, plan.steps, *facts)
        worker.schema, worker.samples = self._engine.schema, len(plan.parts[rank])
        worker.find_layers = lambda: plan.layers(self._engine)
        worker.notes, worker.state = plan.strategy.notes, plan.strategy.worker_state(worker)
        seat.node = worker
        seat.program = _life(plan.strategy, worker)

    def _seat_server(self, index: int, params: FlatArray) -> None:
        plan, address = self.plan, server(index)
        seat = self.seats[address] = Seat(self, Account(address, self._emit))
        held = plan.held(len(params))[index]
        node = Server(index, plan.cluster, params[held].copy(), seat, plan.random(address), plan.optimizer)
        node.schema, node.held = self._engine.schema, held
        node.notes, node.state = plan.strategy.notes, plan.strategy.master_state(node)
        seat.node = node
        seat.program = plan.strategy.master(node)

    def save(self) -> dict[Address, Saved]:
        """What every node must be given to go on from here, in another simulation with a larger budget of steps.

        Meant for after `run`: what was on its way then has been delivered.
        """
        return {address: self._saved(seat.node) for address, seat in self.seats.items()}

    def _saved(self, node: Node) -> Saved:
        optimizer = node.optimizer_state if isinstance(node, Server) else self._steppers[node.address].state
        return copy.deepcopy(
            Saved(
                node.params,
                node.step,
                node.state,
                dict(node.random.bit_generator.state),
                optimizer,
                node.version if isinstance(node, Server) else 0,
                self._batches[node.address].state() if isinstance(node, Worker) else {},
            )
        )

    def _restore(self, seat: Seat, saved: Saved) -> None:
        node, saved = seat.node, copy.deepcopy(saved)
        node.params[:] = saved.params
        node.step, node.state = saved.step, saved.state
        node.random.bit_generator.state = saved.random
        if isinstance(node, Server):
            node.optimizer_state, node.version = saved.optimizer, saved.version
        else:
            self._steppers[node.address].state = saved.optimizer
            self._batches[node.address].restore(saved.batches)

    def _die(self, address: Address) -> None:
        """A node is no more: its program ends where it is, and what reaches it goes nowhere."""
        seat = self.seats[address]
        if seat.done:
            return
        seat.program.close()
        seat.done, seat.dead, seat.waiting = True, True, None
        if seat.computing is not None:
            seat.computing.void = True
        self._pending.discard(address)

    def _notice(self, address: Address) -> None:
        """The others hear that a node is dead; where they cannot do without it, that is the end."""
        if not self.seats[address].dead:
            return
        self._emit(Lost(self.now, address, f"{node_name(address)} died"))
        self.tracker.lose(address)
        others = [seat for seat in self.seats.values() if not seat.done]
        if others and (address < 0 or not self.plan.strategy.traits.survives):
            waits = "; ".join(f"{node_name(s.node.address)} {doing(s)}" for s in others[:4])
            raise PeerLost(f"{node_name(address)} died at step {self.seats[address].node.step}; {waits}")
        for seat in others:
            seat.node.lose(address)
            self._wake(seat, self.now)

    def _resume(self, seat: Seat, value: FlatArray | Message | PeerLost | None) -> None:
        try:
            if isinstance(value, PeerLost):
                effect: Effect = seat.program.throw(value)
            else:
                effect = seat.program.send(value)
        except StopIteration:
            self._ended(seat)
            return
        if isinstance(effect, NeedGradient):
            self._start_gradient(seat, effect)
        else:
            assert not isinstance(effect, NeedWork), "in virtual time nothing goes on outside of messages"
            seat.waiting = effect
            seat.blocked_at = self.now
            if seat.node.address < 0:
                self._server_tick(seat)

    def _start_gradient(self, seat: Seat, need: NeedGradient) -> None:
        rank, step, now = seat.node.address, seat.node.step, self.now
        before, seat.computing = seat.computing, None
        if before is not None and before.need.share < need.share:  # the rest of the gradient that is under way
            seat.computing = Ready(seat, need, before.began, now, before.finish)
            self._queue.schedule(max(now, due(before.began, before.finish, need.share)), seat.computing)
            return
        if step % self.plan.evaluate_every == 0:
            self._hand_in(step // self.plan.evaluate_every, seat)
        self._gradients.give_back(rank)
        indices = self._indices[rank] = self._batches[rank].next(need)
        self._pending.add(rank)
        stretch = len(indices) / self.plan.batch * (1 + FORWARD * len(need.teachers))
        finish = self._clock.finish(rank, now, stretch)
        seat.computing = Ready(seat, need, now, now, finish)
        self._queue.schedule(due(now, finish, need.share), seat.computing)
        if need.unless is not None:
            self._give_up(seat)

    def _give_up(self, seat: Seat) -> None:
        """End a worker's computing if the message that makes it needless is here."""
        ready = seat.computing
        assert ready is not None
        found = seat.node.mailbox.take(Wanted(ready.need.unless))
        if found is None:
            return
        ready.void, seat.computing = True, None
        self._pending.discard(seat.node.address)
        seat.account.spent("compute", ready.started, self.now)
        seat.account.step(self.now, None)
        self._resume(seat, found)

    def _gradient_due(self, event: Ready) -> None:
        seat, rank = event.seat, event.seat.node.address
        if event.void:
            return
        if rank in self._pending:
            self._compute_pending()
        loss = float(self._losses[rank])
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss of worker {rank} is {loss} at step {seat.node.step}; lower the learning rate, "
                f"now {self.plan.lr_at(seat.node.step):g}"
            )
        size = event.need.size(len(seat.node.params))  # what lies behind it was never written
        require_finite_gradient(seat.node, self._gradients.row(rank), 0, size)
        self._steppers[rank].lr = self.plan.lr_at(seat.node.step)
        seat.account.spent("compute", event.started, self.now)
        if event.need.closes:
            seat.account.step(self.now, loss)
            self._steps += 1
            if self._report is not None:
                self._report(self._steps, self.now)
        if event.need.share == 1:
            seat.computing = None
        if isinstance(seat.node, Worker):
            seat.node.loss = loss
        self._resume(seat, self._gradients.row(rank))

    def _compute_pending(self) -> None:
        pending = sorted(self._pending)
        self._pending.clear()
        alone = {rank for rank in pending if self._is_alone(self._need(rank), self._indices[rank])}
        for rank in sorted(alone):
            self._compute_alone(rank)
        pending = [rank for rank in pending if rank not in alone]
        for size in sorted({len(self._indices[rank]) for rank in pending}):
            self._compute_batches([rank for rank in pending if len(self._indices[rank]) == size])

    def _compute_batches(self, pending: list[int]) -> None:
        """Gradients over equally many samples each, together."""
        for start in range(0, len(pending), ROWS):
            ranks = pending[start : start + ROWS]
            steps = [self.seats[rank].node.step for rank in ranks]
            indices = np.stack([self._indices[rank] for rank in ranks])
            params = np.take(self._params, ranks, 0, self._gradients.gathered[: len(ranks)], "clip")
            out = self._gradients.take(ranks)
            self._losses[ranks] = self._engine.gradients(params, indices, out, ranks, steps)

    def _compute_alone(self, rank: int) -> None:
        """A gradient that cannot be computed together with those of other workers."""
        out, step = self._gradients.take([rank])[0], self.seats[rank].node.step
        self._losses[rank] = computed(
            self._engine, self._need(rank), self._params[rank], self._indices[rank], out, rank, step
        )

    def _is_special(self, need: NeedGradient, indices: Indices) -> bool:
        """Whether a gradient is over another number of samples than a batch, or of more than the loss."""
        return len(indices) != self.plan.batch or bool(need.teachers or need.layers)

    def _is_alone(self, need: NeedGradient, indices: Indices) -> bool:
        return self._is_special(need, indices) and bool(need.samples or need.teachers or need.layers)

    def _need(self, rank: int) -> NeedGradient:
        ready = self.seats[rank].computing
        return GRADIENT if ready is None else ready.need

    def _forward(self, event: Arrival) -> None:
        transit = event.transit
        self._queue.schedule(transit.tail if transit.done else transit.head, event)

    def _deliver(self, event: Arrival) -> None:
        seat, message = self.seats[event.transit.to], event.message
        node = seat.node
        if seat.dead:
            return
        seat.account.traffic.received(message)
        require_finite_message(node, message)
        if node.address < 0:
            self._progress[node.address].heard(message)
        if node.busy and node.address in self._pending:
            self._compute_pending()  # a background task may change the parameters that this gradient is of
        node.deliver(message)
        self._wake(seat, event.sent_at)

    def _wake(self, seat: Seat, sent_at: float) -> None:
        """Let a program go on if what it waits for is here, or cannot come any more."""
        if seat.waiting is None:
            if seat.computing is not None and seat.computing.need.unless is not None:
                self._give_up(seat)
            return
        found: Message | PeerLost | None = seat.node.mailbox.take(seat.waiting)
        if found is None:
            if seat.waiting.source not in seat.node.departed:
                return
            found = seat.node.missed(seat.waiting)
        # What a node waits for is communication once it has been sent, and waiting before.
        underway = max(seat.blocked_at, sent_at)
        seat.account.spent("wait", seat.blocked_at, underway)
        seat.account.spent("comm", underway, self.now)
        seat.waiting = None
        self._resume(seat, found)

    def _server_tick(self, seat: Seat) -> None:
        for tick in self._progress[seat.node.address].due():
            self._hand_in(tick, seat)

    def _hand_in(self, tick: float, seat: Seat) -> None:
        node = seat.node
        self.tracker.add(tick, node.address, node.params, self.now, node.step, seat.account.traffic.sent_bytes)

    def _ended(self, seat: Seat) -> None:
        seat.done = True
        seat.waiting = None
        self._hand_in(FINAL, seat)
        seat.account.close(self.now, seat.node.params)


async def _life(strategy: Strategy, me: Worker) -> None:
    await strategy.worker(me)
    await strategy.finish(me)
