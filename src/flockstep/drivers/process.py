"""A worker or a server of a declared job, in a process of its own."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from flockstep.arrays.memory import release
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.drivers.member import Member, Ticket, failure_of, knock
from flockstep.drivers.plan import Batches, LocalOptimizer, Plan, computed, node_random
from flockstep.drivers.real import Runner, Seat
from flockstep.drivers.renewal import Reception, Renewed
from flockstep.drivers.together import Together, group_of, home_of
from flockstep.drivers.tracker import Progress
from flockstep.errors import Diverged, FlockstepError
from flockstep.expression import to_data, to_text
from flockstep.frameworks.base import Engine
from flockstep.nodes import Server, Worker
from flockstep.optimizers.base import Optimizer
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.strategies.base import Strategy


def run_worker(ticket: Ticket, make: Callable[[], tuple[Engine, Plan]]) -> int:
    """Take part in a run as a worker; return the process's exit code."""
    with _guarded(ticket) as guard:
        engine, plan = make()
        release()
        largest, notes = engine.buffers(ticket.address).nbytes, plan.strategy.notes
        member = guard.member = Member(ticket, engine.schema, largest, notes)
        params = engine.home()
        _warm_up(engine, params, plan, ticket.address)
        cluster, params[:] = member.join(to_text(plan.strategy), to_data(plan.optimizer), params)
        with EventWriter(RunFolder(ticket.record).node_events_file(ticket.address), flush_every=1) as events:
            seat = Seat(member, bool(plan.strategy.traits.survives), plan.evaluate_every, events.write)
            stepper = LocalOptimizer(plan.optimizer, params, engine.schema.slices)
            stepper.lr = plan.lr_at(0)
            worker = guard.worker = Worker(
                ticket.address,
                cluster,
                params,
                seat,
                plan.random(ticket.address),
                stepper,
                plan.steps,
                plan.optimizer,
                engine.train_size,
                engine.schema.slices,
            )
            worker.schema, worker.samples = engine.schema, len(plan.parts[ticket.address])
            worker.find_layers = lambda: plan.layers(engine)
            worker.notes, worker.state = notes, plan.strategy.worker_state(worker)
            worker.freeze = member.bus.lend
            seat.node, guard.seat = worker, seat
            worker.rendezvous = seat.meeting()
            group = group_of(member, cluster)
            worker.together = None if group is None else Together(group, seat)
            gradient = home_of(group, len(params), params.dtype.name)
            seat.snapshots.buffers = lambda: engine.buffers(ticket.address)
            release()
            _train(engine, worker, stepper, seat, plan, gradient)
            seat.close()
        member.wait_for_end()
    return guard.code


def run_server(ticket: Ticket, index: int, strategy: str, optimizer: str, schema: Schema, every: int) -> int:
    """Take part in a run as a server; return the process's exit code."""
    with _guarded(ticket) as guard:
        rule = Strategy.parse(strategy)
        member = guard.member = Member(ticket, schema, notes=rule.notes)
        spec = Optimizer.parse(optimizer)
        spec.load()
        cluster, params = member.join(to_text(rule), to_data(spec), None)
        held = rule.held(cluster.workers, len(params))[index]
        with EventWriter(RunFolder(ticket.record).node_events_file(ticket.address), flush_every=1) as events:
            seat = Seat(member, bool(rule.traits.survives), every, events.write)
            seat.progress = Progress(cluster, every) if every else None
            random = node_random(RunFolder(ticket.record).read_config().seed, ticket.address)
            node = Server(index, cluster, params[held].copy(), seat, random, spec)
            node.schema, node.held, node.notes = schema, held, rule.notes
            node.optimizer_state.start = held.start
            node.state = rule.master_state(node)
            node.freeze = member.bus.lend
            seat.node = node
            guard.seat = seat
            seat.reception = Reception(node, rule)
            _serve(rule, node, seat, seat.reception)
            seat.close()
        member.wait_for_end()
    return guard.code


def _serve(rule: Strategy, node: Server, seat: Seat, reception: Reception) -> None:
    """Run a server's program, again from its beginning whenever a script has replaced the model."""
    while True:
        runner = Runner(rule.master(node), seat)
        try:
            runner.advance(None)
        except Renewed:
            runner.close()
            reception.renew()
        else:
            reception.end()
            return


def _train(
    engine: Engine, worker: Worker, stepper: LocalOptimizer, seat: Seat, plan: Plan, gradient: FlatArray
) -> None:
    batches = Batches(plan, worker.rank)
    runner = Runner(plan.strategy.worker(worker), seat)
    value: FlatArray | None = None
    loss: float | None = None
    while runner.advance(value, loss):
        need = runner.need
        stepper.lr = plan.lr_at(worker.step)
        loss = computed(engine, need, worker.params, batches.next(need), gradient, worker.rank, worker.step)
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss of worker {worker.rank} is {loss} at step {worker.step}; lower the learning rate, "
                f"now {worker.lr:g}"
            )
        worker.loss, value = loss, gradient
    Runner(plan.strategy.finish(worker), seat).advance(None)


def _warm_up(engine: Engine, params: FlatArray, plan: Plan, rank: int) -> None:
    """Compute one gradient before the clock starts: the first one pays for lazy initialisation."""
    indices = np.zeros(plan.batch, np.int64)
    buffers = engine.buffers(rank)
    engine.gradient(params, indices, np.zeros_like(params), rank, 0)
    engine.restore_buffers(rank, buffers)


class _Guard:
    def __init__(self) -> None:
        self.member: Member | None = None
        self.worker: Worker | None = None
        self.seat: Seat | None = None
        self.code = 0


@contextmanager
def _guarded(ticket: Ticket) -> Iterator[_Guard]:
    """Turn errors into a sentence for the supervisor; leave Ctrl-C to it, so that the record is kept."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guard = _Guard()
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows shows as a loss that is not finite
            yield guard
    except Exception as error:  # noqa: BLE001 - the job's code may raise anything
        guard.code = error.exit_code if isinstance(error, FlockstepError) else 1
        failure = failure_of(error, ticket, guard.worker.step if guard.worker is not None else None)
        if guard.member is None:
            knock(ticket, failure)
        else:
            if guard.seat is not None:
                guard.seat.salvage()
            guard.member.fail(failure)
    finally:
        if guard.worker is not None and guard.worker.rendezvous is not None:
            guard.worker.rendezvous.close(failed=guard.code != 0)
        if guard.member is not None:
            guard.member.close(0.3 if guard.code else 0.0)
