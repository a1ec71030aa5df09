"""A worker or a server of a declared job in a separate process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from flockstep.arrays.memory import release
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.frameworks.base import Engine
from flockstep.messages import node_name
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer
from flockstep.programs import NeedGradient
from flockstep.records.failpoints import reach
from flockstep.runtime.fault_injector import wrong_gradients
from flockstep.runtime.member import BeginAgain, NodeSpec
from flockstep.runtime.node_creation import make_server
from flockstep.runtime.part_group import PartGroup, groups_of
from flockstep.runtime.plan import Batches, LocalOptimizer, Plan, computed
from flockstep.runtime.real import NodeConnection
from flockstep.runtime.real_part import PartConnection
from flockstep.runtime.runner import Runner
from flockstep.runtime.session import Session
from flockstep.runtime.settings import room_for
from flockstep.split.parts import notes_between
from flockstep.split.stages import SplitModel
from flockstep.strategies.base import Strategy


def run_worker(
    node_spec: NodeSpec, make: Callable[[], tuple[Engine, Plan]], asked_to_leave: Callable[[], bool] = lambda: False
) -> int | BeginAgain:
    """Take part in a run as a worker; return the exit code of the process, or the specification with which the process
    continues the run.

    `make` returns the engine, which has computed a gradient (see `warm_up`), and the plan. `asked_to_leave` returns
    whether a signal has asked this worker to leave the run.
    """
    with np.errstate(over="ignore", invalid="ignore"), Session(node_spec) as session:
        # An overflow shows as a loss that is not finite.
        engine, plan = make()
        if plan.split is not None:
            _run_part(session, engine, plan, plan.split)
        else:
            _run_whole(session, engine, plan, asked_to_leave)
    return session.again or session.exit_code


def _run_whole(session: Session, engine: Engine, plan: Plan, asked_to_leave: Callable[[], bool]) -> None:
    """Take part in a run as a worker that holds a whole replica."""
    strategy, rank = plan.strategy, session.node_spec.address
    largest, params = max(engine.buffers(rank).nbytes, strategy.largest_message), engine.home()
    _, params[:] = session.meet(strategy, plan.optimizer.on_servers, engine.schema, params, largest=largest)
    stepper = LocalOptimizer(plan.optimizer, params, engine.schema.slices)
    stepper.lr = plan.lr_at(0)
    worker = plan.worker(engine, rank, params, stepper)
    release()
    session.load(worker)
    connection = session.begin(lambda member: NodeConnection(member, worker, strategy, plan.evaluate_every))
    connection.asked_to_leave = asked_to_leave
    connection.runner.wrong_gradients = wrong_gradients(plan.faults, rank)
    gradient = connection.home(np.zeros(params.shape, params.dtype))
    ours, batches = connection.checkpoints, Batches(plan, rank)
    ours.stepper, ours.batches = stepper, batches
    ours.buffers = connection.snapshots.buffers = lambda: engine.buffers(rank)
    session.start(
        lambda: connection.runner.begin(strategy.worker(worker), partial(strategy.finish, worker)),
        partial(engine.restore_buffers, rank),
        stops=strategy.traits.restarts,
    )
    _train(engine, worker, stepper, batches, connection.runner, plan, gradient)
    session.leave()


def _run_part(session: Session, engine: Engine, plan: Plan, split: SplitModel) -> None:
    """Take part in a run as the worker that holds one part of one replica."""
    strategy, address = plan.strategy, session.node_spec.address
    servers, parts = plan.cluster.servers, split.partition.parts
    group = groups_of(split.sizes, servers)[address % parts]
    part, rank = split.parts[group.part], address // parts
    name = f"{split.partition.part_name(group.part)} of replica {rank} (worker {address})"
    between = split.largest_message(max(map(plan.batch_at, range(plan.steps))))
    largest = max(part.held_bytes, strategy.largest_message, between)
    schema, notes = engine.schema, notes_between(split)
    params = part.take(
        session.meet(strategy, plan.optimizer.on_servers, schema, largest=largest, part=name, notes=notes)[1]
    )
    stepper = LocalOptimizer(plan.optimizer, params, part.schema.slices)
    stepper.lr = plan.lr_at(0)
    worker = plan.worker(part, rank, params, stepper)
    release()
    kept, batches = session.load(worker, group), Batches(plan, rank)
    taken = 0 if kept is None else kept.before + kept.step
    connection = session.begin(lambda member: PartConnection(member, worker, plan, split, group, batches, taken))
    ours = connection.checkpoints
    ours.stepper, ours.batches = stepper, batches
    ours.buffers = connection.snapshots.buffers = lambda: part.buffers(rank)
    session.start(
        lambda: connection.runner.begin(strategy.worker(worker), partial(strategy.finish, worker)),
        partial(part.restore_buffers, rank),
        stops=strategy.traits.restarts,
    )
    connection.train(stepper)
    session.leave()


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
    with np.errstate(over="ignore", invalid="ignore"), Session(node_spec) as session:
        rule, spec = Strategy.parse(strategy), Optimizer.parse(optimizer)
        spec.load()  # before the others are met, who would wait for the import at their first step
        largest = max(rule.largest_message, room_for(optimizer))
        part = "" if group is None else f"a server of part {group.part} ({node_name(node_spec.address)})"
        cluster, params = session.meet(rule, spec, schema, largest=largest, part=part)
        if group is not None:
            cluster, schema = rule.cluster(cluster.workers // group.parts), group.schema(schema)
            params = params.view(schema.dtype)
        node = make_server(rule, cluster, index, params, schema, node_spec.seed, spec)
        session.load(node, group)
        connection = session.begin(lambda member: NodeConnection(member, node, rule, every, group))
        session.start(lambda: connection.runner.serve(rule, node), stops=rule.traits.restarts)
        connection.drive(connection.runner)
        session.leave()
    return session.exit_code


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
