"""Runs all programs of a run in one process, in virtual time.

Gradients are real: they are computed on real data at each replica's own parameters. Only time is modeled. A gradient
requested at time t is a function of the parameters at t, so it may be computed at any moment before it is due; pending
requests of all workers are computed together when the first of them is due.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, PeerLost, RunError
from flockstep.frameworks.base import Engine, TrainedModel
from flockstep.messages import HEADER_BYTES, LEAVE, Address, Message, node_name
from flockstep.nodes import Hosts, Node, Server, Worker
from flockstep.programs import NeedGradient
from flockstep.records.events import Event, LostEvent
from flockstep.runtime.batched import BatchedGradients, ReplicaGradients
from flockstep.runtime.cut import Cut, cut_of
from flockstep.runtime.fault_injector import FaultInjector, wrong_gradients
from flockstep.runtime.node_creation import make_server
from flockstep.runtime.node_metrics import Emit, NodeMetrics
from flockstep.runtime.plan import Batches, LocalOptimizer, Plan
from flockstep.runtime.replication import ProgramEvents, replicate
from flockstep.runtime.runner import History, Runner
from flockstep.runtime.state import from_bytes, to_bytes
from flockstep.runtime.tracker import FINAL, Progress, Tracker
from flockstep.simulation.collector import seldom
from flockstep.simulation.compute import FORWARD, ComputeModel
from flockstep.simulation.faults import Fault
from flockstep.simulation.network import Fabric, Network, Transit
from flockstep.simulation.queue import EventQueue


class Computing(msgspec.Struct, eq=False, gc=False):
    """A gradient, or a requested part of one, that a worker is computing in virtual time."""

    share: float
    """Fraction of the gradient, counted from the end of the flat array, that the program has requested."""


@dataclass(frozen=True, eq=False)
class Surroundings:
    """Objects that all nodes of a simulation use: clock, network and record. The groups of a split model share most of
    them.
    """

    model: TrainedModel
    """The model, or the part of the model that these nodes hold."""
    queue: EventQueue[Callable[[], None]]
    fabric: Fabric
    snapshot: Callable[[float, Address, FlatArray, float, int, int], None]
    """Function that adds a node's current parameters to a tick of progress, as `Tracker.add` does."""
    lose: Callable[[Address], None]
    """Function that stops waiting for the parameters of a lost node, as `Tracker.lose` does."""
    gradients: ReplicaGradients
    hosts: Hosts
    address: Callable[[Address], Address] = lambda address: address
    """Function that translates the address of one of these nodes to its address in the whole run."""
    start: Callable[[Runner, NeedGradient], None] | None = None
    """Function that starts to compute a worker's gradient, which is later passed to `Simulation.answer`; None if each
    worker computes by itself.
    """


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
        faults: Sequence[Fault] = (),
        within: Surroundings | None = None,
    ):
        """`within`: surroundings that other simulations share."""
        self.plan = plan
        held, served = plan.held(engine.schema.size), plan.strategy.traits.served
        self.tracker = Tracker(engine, plan.result, plan.cluster, held, plan.samples_at, emit, served)
        self._engine = engine
        self._emit = emit
        self._program_events = ProgramEvents(plan.cluster)
        self._report = progress
        if within is None:
            hosts, fabric = network.hosts(plan.cluster.workers), network.start(plan.cluster)
            add, lose, gradients = self.tracker.add, self.tracker.lose, BatchedGradients(engine, plan)
            within = Surroundings(engine, EventQueue(), fabric, add, lose, gradients, hosts)
        self._within = within
        self._queue, self._fabric, self._gradients = within.queue, within.fabric, within.gradients
        self._clock_of_run = partial(getattr, self._queue, "now")
        self._faults, self._fault_injector = faults, FaultInjector(faults, plan.cluster)
        self._clock = self._fault_injector.clock(compute.start(plan.cluster.workers, plan.seed))
        if within.start is None:
            self._fabric.handle_with(self._clock.handle)
        self._fault_injector.narrow_at_start(self._fabric)
        self._computing: dict[int, Computing] = {}
        self._dead: set[Address] = set()
        self._steps = 0
        self._steppers: dict[int, LocalOptimizer] = {}
        self.runners: dict[Address, Runner] = {}
        with seldom():
            self._make_nodes()

    @property
    def now(self) -> float:
        """Current virtual time in seconds."""
        return self._queue.now

    def continue_from(self, saved: Mapping[Address, Cut]) -> None:
        """Let the run continue from the result of `save`; call this before `run`."""
        for address, one in saved.items():
            self._restore(self.runners[address].node, copy.deepcopy(one))

    def run(self, restarts: Sequence[float] = ()) -> None:
        """Run every program to its end; at the times `restarts` all nodes restart from bytes.

        Raises:
            CompositionError: the strategy's nodes cannot restart.
            Diverged: a loss is not finite.
            RunError: the programs wait for each other forever.
        """
        with np.errstate(over="ignore", invalid="ignore"), seldom():  # an overflow shows as a loss that is not finite
            self.begin(restarts)
            self._fault_injector.schedule(self._queue, self._fabric, self.die, self.notice)
            self._end()
        self.tracker.close()

    def begin(self, restarts: Sequence[float] = ()) -> None:
        """Begin every program, servers first."""
        if restarts and not self.plan.strategy.traits.restarts:
            raise CompositionError(
                f"{self.plan.strategy} cannot restart in the middle of a run, because no single node holds its whole "
                "state; let the run continue to its end"
            )
        if restarts:
            for runner in self.runners.values():
                runner.remember(History(), partial(self._state, runner))
        for address in sorted(self.runners, key=lambda address: (address >= 0, abs(address))):
            self._begin(self.runners[address])
        for t in restarts:
            self._queue.schedule(t, self._begin_anew)

    def _end(self) -> None:
        """Deliver messages until every program has ended."""
        self._queue.run()
        self.require_ended()

    def require_ended(self) -> None:
        """Check that every program has ended.

        Raises:
            RunError: the programs wait for each other forever.
        """
        stuck = [runner for runner in self.runners.values() if not runner.done]
        if stuck:
            waits = "; ".join(f"{node_name(r.node.address)} for {r.waiting} at step {r.node.step}" for r in stuck[:4])
            raise RunError(f"deadlock: every program waits for a message that no program will send: {waits}")

    def drain(self, kept: Mapping[Address, Cut]) -> dict[Address, Cut]:
        """Run programs that were stopped between two steps to their end, without a further gradient.

        Nothing is evaluated or recorded. `kept` holds the state of each node that lives, with all messages that have
        arrived, at a point where its program can restart.

        Returns:
            The state of every node that lives, with all messages used.

        Raises:
            RunError: the programs wait for each other forever.
        """
        for address in self.runners.keys() - kept.keys():
            self.die(address)  # before the others begin: they know it from their states
        for address, saved in kept.items():
            runner = self.runners[address]
            node = runner.node
            self._restore(node, copy.deepcopy(saved))
            runner.ended = runner.send_snapshot = runner.progress = None
            runner.recorded = False
            if isinstance(node, Worker):
                node.steps = node.step
                self._steppers[address].lr = self.plan.lr_at(node.run_step)
                if self.plan.strategy.traits.survives:
                    runner.ended = partial(self._release, address)
        for address in sorted(kept, key=lambda address: (address >= 0, abs(address))):
            runner = self.runners[address]
            runner.restart_from(partial(self._begin, runner), partial(kept[address].settle, runner.node))
        self._end()
        return {address: saved for address, saved in self.save().items() if address in kept}

    def _release(self, rank: Address) -> None:
        """Tell the servers that a worker has ended behind the others, as in a real run, so that none waits for it."""
        for address, runner in self.runners.items():
            if address < 0 and not runner.done:
                self.send(address, Message(rank, LEAVE, note={"lost": 1}))

    def stop(self) -> None:
        """End every program at its current point, and write each node's totals."""
        for runner in self.runners.values():
            if not runner.done:
                runner.close()
                runner.metrics.close(self.now, runner.node.params)

    def close(self) -> None:
        """Break the references between the nodes, so that their memory is free at once; the simulation cannot be used
        afterwards.

        The nodes refer to each other, so that otherwise only Python's garbage collector would free them, which runs
        rarely during later simulations.
        """
        for runner in self.runners.values():
            runner.send_snapshot = runner.source = runner.ended = runner.replication = runner.node.at_boundary = None
            del runner.node.port
        self.runners.clear()

    def send(self, to: Address, message: Message) -> None:
        """Send a message to the virtual network."""
        sender, receiver = self.runners[message.source].metrics, self.runners[to].metrics
        queue, nbytes = self._queue, message.payload_bytes
        sender.traffic.sent(nbytes, HEADER_BYTES)
        if not self._fault_injector.drops or not self._fault_injector.lost(to, message):
            arrive = partial(self._arrive, to, message, queue.now)
            carry(queue, self._fabric, sender.address, receiver.address, HEADER_BYTES + nbytes, arrive)

    def later(self, seconds: float, message: Message) -> None:
        """Deliver a message of a node to itself after so many virtual seconds, if its program has not ended then."""
        self._queue.schedule(self._queue.now + seconds, partial(self._ring, message))

    def _ring(self, message: Message) -> None:
        if not self.runners[message.source].done:
            self.runners[message.source].deliver(message)

    def collect(self) -> None:
        """Do nothing, because messages are delivered at their time of arrival."""

    def drive(self, runner: Runner) -> None:
        """Raise an error: in virtual time a node cannot wait alone, because all programs run together."""
        raise RunError(
            "in virtual time a node cannot wait alone, because all programs run together; call Simulation.run"
        )

    def save(self) -> dict[Address, Cut]:
        """Return the state of every node; another simulation, with a larger budget of steps, can continue from it.

        Call this after `run`, when all messages have been delivered.
        """
        return copy.deepcopy({address: self._facts(runner.node) for address, runner in self.runners.items()})

    def _begin(self, runner: Runner) -> None:
        node, strategy = runner.node, self.plan.strategy
        if isinstance(node, Server):
            runner.serve(strategy, node)
        elif isinstance(node, Worker):
            runner.begin(strategy.worker(node), partial(strategy.finish, node))

    def _begin_anew(self) -> None:
        """Replace each node with a new one made from bytes; messages in flight are kept."""
        for runner in self.runners.values():
            if not runner.done and runner.history is not None:
                self._replace(runner, from_bytes(to_bytes(runner.history)))

    def _replace(self, runner: Runner, history: History) -> None:
        """Restart a node.

        Raises:
            RunError: the node does not reach the state that it had.
        """
        old, waited = runner.node, runner.waiting
        before = to_bytes(self._facts(old))
        old.params[:] = np.nan
        runner.close()
        saved = from_bytes(history.point)
        node = self._make_worker(old.address) if isinstance(old, Worker) else self._make_server(-1 - old.address)
        runner.node, node.port = node, runner
        self._restore(node, saved)
        runner.remember(history, partial(self._state, runner))
        runner.replay(history.inputs, partial(self._begin, runner), partial(saved.settle, node))
        differs = to_bytes(self._facts(node)) != before
        if differs or str(runner.waiting) != str(waited):
            other = ", and its state differs" if differs else ""
            raise RunError(
                f"{node_name(node.address)} restarted and waits for {runner.waiting} at step {node.step}, where it "
                f"had waited for {waited} at step {old.step}{other}: state that a program keeps between steps "
                f"belongs in me.state"
            )

    def _state(self, runner: Runner) -> bytes:
        """State from which the node's program can restart, as bytes."""
        return to_bytes(cut_of(runner.node, *self._of_worker(runner.node)))

    def _make_nodes(self) -> None:
        """Create the workers by rank, then the servers by index, each with its runner."""
        plan = self.plan
        for rank in range(plan.cluster.workers):
            runner = self._runner_of(self._make_worker(rank), rank)
            runner.every = plan.evaluate_every
            runner.source = partial(self._within.start or self._start_gradient, runner)
            runner.stepped = None if self._report is None else self._stepped
            runner.wrong_gradients = wrong_gradients(self._faults, rank)
            if plan.strategy.traits.served:
                runner.send_snapshot = None
        for address in plan.cluster.processes[plan.cluster.workers :]:
            runner = self._runner_of(self._make_server(-1 - plan.cluster.logical(address)), address)
            runner.progress = Progress(plan.cluster, plan.evaluate_every)

    def _make_worker(self, rank: int) -> Worker:
        plan, model, params = self.plan, self._within.model, self._gradients.params[rank]
        stepper = self._steppers[rank] = LocalOptimizer(plan.optimizer, params, model.schema.slices)
        stepper.lr = plan.lr_at(0)
        worker = self._gradients.nodes[rank] = plan.worker(model, rank, params, stepper)
        worker.hosts = self._within.hosts
        return worker

    def _make_server(self, index: int) -> Server:
        plan, model = self.plan, self._within.model
        facts = plan.strategy, plan.cluster, index, model.initial(), model.schema, plan.seed
        made = make_server(*facts, plan.optimizer.on_servers)
        made.hosts = self._within.hosts
        made.bad_gradients = plan.bad_gradients
        return made

    def _runner_of(self, node: Node, address: Address) -> Runner:
        """`address`: address of the node's process."""
        emit = self._emit if node.address >= 0 or not self.plan.cluster.replicas else partial(self._emit_once, address)
        metrics = NodeMetrics(self._within.address(address), emit)
        runner = self.runners[address] = Runner(node, self, metrics, self._clock_of_run)
        runner.send_snapshot = partial(self._send_snapshot, runner)
        runner.ended = partial(self._ended, runner)
        runner.quarantine = self._quarantine
        runner.replication = replicate(runner, self.plan.cluster, address, self.send)
        return runner

    def _emit_once(self, address: Address, event: Event) -> None:
        """Write an event of a process of a replicated server."""
        if (kept := self._program_events.once(address, event)) is not None:
            self._emit(kept)

    def _facts(self, node: Node) -> Cut:
        """The current state of a node, not copied."""
        return cut_of(node, *self._of_worker(node), messages=False)

    def _of_worker(self, node: Node) -> tuple[LocalOptimizer | None, Batches | None]:
        """A worker's optimizer and its place in the data; servers have neither."""
        worker = isinstance(node, Worker)
        return (self._steppers[node.address], self._gradients.batches[node.address]) if worker else (None, None)

    def _restore(self, node: Node, saved: Cut) -> None:
        """Give a node a saved state, which no other node shares."""
        saved.restore(node, self._of_worker(node)[0])
        if isinstance(node, Worker):
            self._gradients.restart(node.address, saved.batches)

    def die(self, address: Address) -> None:
        """End a node's program at its current point; messages to the node are dropped from now on."""
        runner = self.runners[address]
        if runner.done:
            return
        runner.close()
        self._dead.add(address)
        self._drop_gradient(address)

    def _quarantine(self, address: Address, reason: str) -> None:
        """Remove a worker from the run, for a reason, as soon as the current program waits."""

        def remove() -> None:
            self.die(address)
            self.notice(address, reason)

        self._queue.schedule(self.now, remove)

    def notice(self, address: Address, reason: str = "") -> None:
        """Tell the other nodes that a node has died; the run ends if the strategy needs the dead node."""
        if address not in self._dead:
            return
        here = self.address(address)
        self._emit(LostEvent(self.now, here, reason or f"{node_name(here)} died"))
        if address < 0 and not self._dead.issuperset(self.plan.cluster.chain(self.plan.cluster.logical(address))):
            for runner in self.runners.values():
                if runner.metrics.address not in self._dead:
                    runner.lose(address)
                    self._look_for_needless(runner)
            return
        self._within.lose(address)
        others = [runner for runner in self.runners.values() if not runner.done]
        if others and (address < 0 or not self.plan.strategy.traits.survives):
            waits = "; ".join(f"{node_name(runner.node.address)} {_doing(runner)}" for runner in others[:4])
            raise PeerLost(f"{node_name(here)} died at step {self.runners[address].node.step}; {waits}")
        for runner in others:
            runner.lose(address)
            self._look_for_needless(runner)

    def _start_gradient(self, runner: Runner, need: NeedGradient) -> None:
        rank, now = runner.node.address, self._queue.now
        if runner.replaying:
            if not runner.partly:
                self._gradients.batches[rank].next(need)
            return
        if not runner.partly:  # otherwise the rest of the running gradient is wanted
            stretch = self._gradients.ask(rank, need) / self.plan.batch
            if need.teachers:
                stretch *= 1 + FORWARD * len(need.teachers)
            self._clock.begin(rank, now, stretch)
        self._expect(runner, need.share)
        if need.unless is not None:
            self._look_for_needless(runner)

    def _expect(self, runner: Runner, share: float) -> None:
        """Schedule the time at which the requested share of a worker's gradient is complete."""
        rank, now = runner.node.address, self._queue.now
        self._computing[rank] = computing = Computing(share)
        due = self._clock.due(rank, now, share)
        self._queue.schedule(max(now, due), partial(self._gradient_due, runner, computing))

    def _look_for_needless(self, runner: Runner) -> None:
        """Cancel the worker's gradient if the message that supersedes it has arrived."""
        found = runner.needless()
        if found is not None:
            self._drop_gradient(runner.node.address)
            runner.give_up(found)

    def _drop_gradient(self, rank: Address) -> None:
        self._computing.pop(rank, None)
        self._gradients.forget(rank)
        self._clock.drop(rank, self._queue.now)
        if not self._clock.fixed:  # the others have more of the cores
            for other, computing in list(self._computing.items()):
                if type(self.runners[other].waiting) is NeedGradient:
                    self._expect(self.runners[other], computing.share)

    def _gradient_due(self, runner: Runner, computing: Computing) -> None:
        rank = runner.node.address
        if self._computing.get(rank) is not computing:  # canceled meanwhile
            return
        if not self._clock.fixed and self._clock.due(rank, self._queue.now, computing.share) > self._queue.now:
            self._expect(runner, computing.share)  # gradients that began meanwhile slow it down
            return
        self.answer(rank, self._gradients.take(rank), self._gradients.losses[rank])

    def address(self, address: Address) -> Address:
        """Return the address in the whole run of a node with the given address in this simulation."""
        return self._within.address(address)

    def answer(self, rank: int, gradient: FlatArray, loss: float) -> None:
        """Resume a worker's program with the gradient that the program waits for."""
        runner = self.runners[rank]
        if self.plan.timetable is not None:
            self._steppers[rank].lr = self.plan.lr_at(runner.node.step)
        runner.give(gradient, loss)

    def _stepped(self, loss: float | None) -> None:
        assert self._report is not None
        self._steps += 1
        self._report(self._steps, self.now)

    def _arrive(self, to: Address, message: Message, sent_at: float) -> None:
        """Deliver a message to its receiver."""
        if to in self._dead:
            return
        runner = self.runners[to]
        if runner.node.tasks:
            self._gradients.keep(to)  # a background task may change the parameters that the gradient is of
        runner.metrics.traffic.received(0 if message.array is None else message.array.nbytes)
        runner.deliver(message, sent_at)
        waiting = runner.waiting
        if type(waiting) is NeedGradient and waiting.unless is not None:
            self._look_for_needless(runner)

    def _send_snapshot(self, runner: Runner, tick: float, params: FlatArray | None = None) -> None:
        """`params`: None for the node's current parameters."""
        node = runner.node
        array = node.params if params is None else params
        sent = runner.metrics.traffic.sent_bytes
        self._within.snapshot(tick, node.address, array, self.now, node.step, sent)

    def _ended(self, runner: Runner) -> None:
        if runner.send_snapshot is not None:
            runner.send_snapshot(FINAL)
        if runner.replication is not None:
            runner.replication.close()
        runner.metrics.close(self.now, runner.node.params)


def carry(
    queue: EventQueue[Callable[[], None]],
    fabric: Fabric,
    source: Address,
    to: Address,
    nbytes: int,
    arrive: Callable[[], None],
) -> None:
    """Send `nbytes` bytes over the network now, and call `arrive` when the last byte has arrived."""
    transit = fabric.depart(source, to, nbytes, queue.now)
    queue.schedule(transit.time, arrive if transit.done else partial(_proceed, queue, fabric, transit, arrive))


def _proceed(
    queue: EventQueue[Callable[[], None]], fabric: Fabric, transit: Transit, arrive: Callable[[], None]
) -> None:
    """Reserve the next hop of a message, and schedule what comes after: its arrival, or another hop."""
    fabric.advance(transit)
    queue.schedule(transit.time, arrive if transit.done else partial(_proceed, queue, fabric, transit, arrive))


def _doing(runner: Runner) -> str:
    """What a node was doing, for an error message."""
    waits = f"waited for {runner.waiting}" if runner.waiting and not isinstance(runner.waiting, NeedGradient) else ""
    return f"at step {runner.node.step} " + (waits or "could not continue")
