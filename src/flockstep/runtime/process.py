"""A worker or a server of a declared job in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from flockstep.arrays.memory import release
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import FlockstepError
from flockstep.expression import to_data, to_text
from flockstep.frameworks.base import Engine
from flockstep.frameworks.stages import SplitModel
from flockstep.messages import node_name
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer
from flockstep.programs import NeedGradient
from flockstep.records.failpoints import reach
from flockstep.runtime.checkpoints import NodeCheckpoint, load
from flockstep.runtime.fault_injector import wrong_gradients
from flockstep.runtime.member import BeginAgain, Member, NodeSpec, failure_of, send_to_control
from flockstep.runtime.node_creation import make_server
from flockstep.runtime.part_group import PartGroup, groups_of
from flockstep.runtime.parts import notes_between
from flockstep.runtime.plan import Batches, LocalOptimizer, Plan, computed
from flockstep.runtime.program_restart import notes_of
from flockstep.runtime.real import NodeConnection
from flockstep.runtime.real_part import PartConnection
from flockstep.runtime.replication import NOTES as REPLICAS
from flockstep.runtime.runner import Runner
from flockstep.runtime.settings import room_for
from flockstep.strategies.base import Strategy


def run_worker(
    node_spec: NodeSpec, make: Callable[[], tuple[Engine, Plan]], asked_to_leave: Callable[[], bool] = lambda: False
) -> int | BeginAgain:
    """Take part in a run as a worker; return the exit code of the process, or the specification with which the process
    continues the run.

    `make` returns the engine, which has computed a gradient (see `warm_up`), and the plan. `asked_to_leave` returns
    whether a signal has asked this worker to leave the run.
    """
    with _guarded(node_spec) as guard:
        engine, plan = make()
        if plan.split is not None:
            _run_part(guard, node_spec, engine, plan, plan.split)
            return guard.code
        largest = max(engine.buffers(node_spec.address).nbytes, plan.strategy.largest_message)
        member = guard.member = Member(
            node_spec, engine.schema, largest, {**plan.strategy.notes, **REPLICAS}, plan.strategy.sums
        )
        params = engine.home()
        _, params[:] = member.join(to_text(plan.strategy), to_data(plan.optimizer.on_servers), params)
        stepper = LocalOptimizer(plan.optimizer, params, engine.schema.slices)
        stepper.lr = plan.lr_at(0)
        worker = plan.worker(engine, node_spec.address, params, stepper)
        release()
        kept = load(node_spec, node_spec.address, worker.params)
        _be_ready(member, kept)
        connection = guard.connection = NodeConnection(member, worker, plan.strategy, plan.evaluate_every)
        connection.asked_to_leave = asked_to_leave
        connection.runner.wrong_gradients = wrong_gradients(plan.faults, node_spec.address)
        connection.snapshots.buffers = lambda: engine.buffers(node_spec.address)
        gradient = connection.home(np.zeros(params.shape, params.dtype))
        ours, batches = connection.checkpoints, Batches(plan, node_spec.address)
        ours.stepper, ours.batches, ours.buffers = stepper, batches, connection.snapshots.buffers
        _begin(
            connection,
            plan.strategy,
            kept,
            lambda: connection.runner.begin(plan.strategy.worker(worker), partial(plan.strategy.finish, worker)),
            lambda values: engine.restore_buffers(node_spec.address, values),
        )
        _train(engine, worker, stepper, batches, connection.runner, plan, gradient)
        connection.close()
        member.wait_for_end(connection.attend)
    return guard.again or guard.code


def _run_part(guard: _Guard, node_spec: NodeSpec, engine: Engine, plan: Plan, split: SplitModel) -> None:
    """Take part in a run as the worker that holds one part of one replica."""
    servers, parts = plan.cluster.servers, split.partition.parts
    group = groups_of(split.sizes, servers)[node_spec.address % parts]
    part, rank = split.parts[group.part], node_spec.address // parts
    guard.where = f"{split.partition.part_name(group.part)} of replica {rank} (worker {node_spec.address}): "
    between = split.largest_message(max(map(plan.batch_at, range(plan.steps))))
    largest = max(part.held_bytes, plan.strategy.largest_message, between)
    member = guard.member = Member(
        node_spec, engine.schema, largest, {**plan.strategy.notes, **REPLICAS, **notes_between(split)}
    )
    params = part.take(member.join(to_text(plan.strategy), to_data(plan.optimizer.on_servers), None, part=True)[1])
    stepper = LocalOptimizer(plan.optimizer, params, part.schema.slices)
    stepper.lr = plan.lr_at(0)
    worker = plan.worker(part, rank, params, stepper)
    release()
    kept, batches = load(node_spec, node_spec.address, worker.params), Batches(plan, rank)
    _be_ready(member, kept, group)
    taken = 0 if kept is None else kept.before + kept.saved.step
    connection = guard.connection = PartConnection(member, worker, plan, split, group, batches, taken)
    connection.snapshots.buffers = lambda: part.buffers(rank)
    ours = connection.checkpoints
    ours.stepper, ours.batches, ours.buffers = stepper, batches, connection.snapshots.buffers
    _begin(
        connection,
        plan.strategy,
        kept,
        lambda: connection.runner.begin(plan.strategy.worker(worker), partial(plan.strategy.finish, worker)),
        partial(part.restore_buffers, rank),
    )
    connection.train(stepper)
    connection.close()
    member.wait_for_end(connection.attend)


def run_server(
    node_spec: NodeSpec,
    index: int,
    strategy: str,
    optimizer: str,
    schema: Schema,
    every: int,
    group: PartGroup | None = None,
) -> int:
    """Take part in a run as a server; return the exit code of the process.

    `group` is the group of the server if the model is split; `index` counts the servers of this group.
    """
    with _guarded(node_spec) as guard:
        rule = Strategy.parse(strategy)
        largest = max(rule.largest_message, room_for(optimizer))
        member = guard.member = Member(node_spec, schema, largest, {**notes_of(rule), **REPLICAS})
        spec = Optimizer.parse(optimizer)
        spec.load()
        cluster, params = member.join(to_text(rule), to_data(spec), None, part=group is not None)
        if group is not None:
            cluster, params, schema = (
                rule.cluster(cluster.workers // group.parts),
                params,
                group.schema(schema),
            )
            params = params.view(schema.dtype)
            guard.where = f"a server of part {group.part} ({node_name(node_spec.address)}): "
        node = make_server(rule, cluster, index, params, schema, node_spec.seed, spec)
        address = node.address if group is None else group.outside(node.address)
        kept = load(node_spec, address, node.params)
        _be_ready(member, kept, group)
        connection = guard.connection = NodeConnection(member, node, rule, every, group)
        _begin(connection, rule, kept, lambda: connection.runner.serve(rule, node))
        connection.drive(connection.runner)
        connection.close()
        member.wait_for_end(connection.attend)
    return guard.code


def _be_ready(member: Member, kept: NodeCheckpoint | None, group: PartGroup | None = None) -> None:
    """Begin the run together with all others."""
    if kept is not None and kept.saved.mailbox is not None:
        received = kept.saved.mailbox.received()
        member.expect(received if group is None else {group.outside(peer): n for peer, n in received.items()})
    member.begin()


def _begin(
    connection: NodeConnection,
    strategy: Strategy,
    kept: NodeCheckpoint | None,
    begin: Callable[[], None],
    restore_buffers: Callable[[FlatArray], None] = lambda values: None,
) -> None:
    """Begin the node's program with `begin`: at its start, or where the run goes on."""
    if strategy.traits.restarts:
        connection.checkpoints.watch()
    if kept is None:
        begin()
    else:
        connection.checkpoints.restore(kept, restore_buffers, begin)


def _train(
    engine: Engine,
    worker: Worker,
    stepper: LocalOptimizer,
    batches: Batches,
    runner: Runner,
    plan: Plan,
    gradient: FlatArray,
) -> None:
    value: FlatArray | None = None
    loss: float | None = None
    while runner.advance(value, loss):
        need = runner.waiting
        assert isinstance(need, NeedGradient)
        stepper.lr = plan.lr_at(worker.run_step)
        indices = batches.next(need)
        if worker.run_step + 1 < plan.steps and (upcoming := batches.upcoming()) is not None:
            engine.prefetch(indices)
            engine.prefetch(upcoming)
        loss = computed(engine, need, worker.params, indices, gradient, worker.rank, worker.step)
        reach("gradient.computed")
        value = gradient


def warm_up(engine: Engine, batch: int) -> None:
    """Compute one gradient of `batch` samples before the clock starts, because the first gradient includes lazy
    initialization.
    """
    params, buffers = engine.home(), engine.buffers(0)
    engine.gradient(params, np.zeros(batch, np.int64), np.zeros(params.shape, params.dtype))
    engine.restore_buffers(0, buffers)


class _Guard:
    def __init__(self) -> None:
        self.member: Member | None = None
        self.connection: NodeConnection | None = None
        self.code = 0
        self.again: BeginAgain | None = None
        self.where = ""
        """Words about the place of this node in the run, before the reason of a failure."""


def _awaited(guard: _Guard, again: BeginAgain) -> BeginAgain | None:
    """Wait for the message how this process takes part again; None if the process leaves."""
    if guard.connection is not None:
        guard.connection.leave(failed=False)
        guard.connection = None
    if again.waits and guard.member is not None:
        try:
            again = guard.member.wait_for_again()
        except FlockstepError as error:
            guard.code = error.exit_code
            return None
    return again if again.node_spec is not None else None


@contextmanager
def _guarded(node_spec: NodeSpec) -> Iterator[_Guard]:
    """Context manager that reports errors to the supervisor as a sentence."""
    guard = _Guard()
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow shows as a loss that is not finite
            yield guard
    except BeginAgain as again:
        guard.again = _awaited(guard, again)
    except Exception as error:  # noqa: BLE001 - the job's code may raise anything
        guard.code = error.exit_code if isinstance(error, FlockstepError) else 1
        failure = failure_of(
            error,
            node_spec,
            guard.connection.node.step if guard.connection is not None and node_spec.address >= 0 else None,
        )
        failure.reason = guard.where + failure.reason
        if guard.member is None:
            send_to_control(node_spec, failure)
        else:
            if guard.connection is not None:
                guard.connection.salvage()
            guard.member.fail(failure)
    finally:
        if guard.connection is not None:
            guard.connection.leave(failed=guard.code != 0)
        if guard.member is not None:
            guard.member.close(0.3 if guard.code else 0.0)
