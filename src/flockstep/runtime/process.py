"""A worker or a server of a declared job in a separate process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from flockstep.arrays.memory import release
from flockstep.arrays.namespace import to_device_of
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.frameworks.base import Engine
from flockstep.messages import Fields, node_name
from flockstep.nodes import Worker
from flockstep.optimizers.base import Optimizer
from flockstep.programs import NeedGradient
from flockstep.records.failpoints import reach
from flockstep.runtime.change import HeldWork, beside, held_of, settle
from flockstep.runtime.fault_injector import wrong_gradients
from flockstep.runtime.member import BeginAgain, Member, NodeSpec
from flockstep.runtime.node_creation import make_server
from flockstep.runtime.part_group import NodePart, PartGroup, groups_of
from flockstep.runtime.plan import FIRST_BATCH, Batches, LocalOptimizer, Plan, computed
from flockstep.runtime.program_restart import notes_of_all
from flockstep.runtime.real import NodeConnection
from flockstep.runtime.real_joint import JointConnection
from flockstep.runtime.real_part import PartConnection
from flockstep.runtime.runner import Runner
from flockstep.runtime.session import Session
from flockstep.runtime.settings import room_for
from flockstep.split.joint import JointModel
from flockstep.split.parts import notes_between
from flockstep.split.stages import SplitModel
from flockstep.strategies.base import Strategy
from flockstep.workloads.sampler import SamplerState


class JobWorker:
    """A worker of a declared job, over all changes of the run's workers that its process lives through."""

    def __init__(self, member_of: Callable[..., Member] | None = None) -> None:
        """`member_of`: see `Session`."""
        self._member_of = member_of
        self._worker: Worker | None = None
        """The worker that this process was before the last change."""
        self._plan: Plan
        """The plan by which its steps are counted."""
        self._batches: Batches
        self._stepper: LocalOptimizer
        self._held: HeldWork
        self._joins = False
        """Whether the process has joined others, and does not have their model yet."""
        self._totals: Mapping[str, Any] = {}
        """Totals of the worker's metrics before the last change."""
        self._loss: float | None = None
        """Loss of the step in hand."""

    def run(
        self, node_spec: NodeSpec, make: Callable[[], tuple[Engine, Plan]], asked_to_leave: Callable[[], bool] = bool
    ) -> int | BeginAgain:
        """Take part in a run; return the exit code of the process, or the specification with which the process
        continues the run.

        `make` returns the engine, which has computed a gradient (see `warm_up`), and the plan. `asked_to_leave` returns
        whether a signal has asked this worker to leave the run.
        """
        with np.errstate(over="ignore", invalid="ignore"), Session(node_spec, None, self._member_of) as session:
            # An overflow shows as a loss that is not finite.
            engine, plan = make()
            if plan.split is not None:
                _run_part(session, engine, plan, plan.split)
            else:
                self._run_whole(session, engine, plan, asked_to_leave)
        self._totals = session.totals or self._totals
        return session.again or session.exit_code

    def _run_whole(self, session: Session, engine: Engine, plan: Plan, asked_to_leave: Callable[[], bool]) -> None:
        """Take part in a run as a worker that holds a whole replica."""
        strategy, node_spec, former = plan.strategy, session.node_spec, self._worker
        if node_spec.checkpoint:  # the state comes from there, not from this process
            former = None
        self._joins = self._joins or node_spec.joins
        rank, repeats = node_spec.address, node_spec.changes and repeats_steps(plan)
        largest = max(engine.buffers(rank).nbytes, strategy.largest_message(engine.schema.nbytes))
        params = engine.home() if former is None else former.params
        _, initial = session.meet(
            strategy, plan.optimizer.on_servers, engine.schema, params, largest=largest, repeats=repeats
        )
        if former is None:
            params[:] = initial
        del initial
        worker = self._made(engine, plan, rank, params, repeats, former)
        release()
        session.load(worker)
        connection = session.begin(lambda member: NodeConnection(member, worker, strategy, plan.evaluate_every))
        connection.asked_to_leave = asked_to_leave
        connection.runner.wrong_gradients = wrong_gradients(plan.faults, rank)
        gradient = connection.home(np.zeros(params.shape, params.dtype))
        ours, batches = connection.checkpoints, Batches(plan, rank)
        ours.stepper, ours.batches = self._stepper, batches
        ours.buffers = connection.snapshots.buffers = lambda: engine.buffers(rank)
        if former is not None:  # a worker that joins has no model to go on with before it has caught up
            self._worker = worker
            connection.runner.metrics.restore(self._totals)
        if former is not None or self._joins:
            self._catch_up(engine, plan, worker, connection.runner, batches)
        self._worker, self._plan, self._batches, self._joins = worker, plan, batches, False
        session.start(
            lambda: connection.runner.begin(strategy.worker(worker), partial(strategy.finish, worker)),
            partial(engine.restore_buffers, rank),
            stops=strategy.traits.restarts,
        )
        self._train(engine, plan, connection.runner, gradient, repeats)
        session.leave()

    def _made(
        self, engine: Engine, plan: Plan, rank: int, params: FlatArray, repeats: bool, former: Worker | None
    ) -> Worker:
        """Return the worker of this run, which goes on where `former` was if there is one."""
        if former is None:
            self._stepper = LocalOptimizer(plan.optimizer, params, engine.schema.slices)
            self._stepper.lr = plan.lr_at(0)
            self._held = held_of(plan.strategy, self._stepper)
        worker = plan.worker(engine, rank, params, self._held.stepper if repeats else self._stepper)
        if former is not None:
            self._held.go_on(worker, former, plan.strategy)
            engine.restore_buffers(rank, engine.buffers(former.rank))
        elif repeats:
            self._held.watch(worker)
        return worker

    def _catch_up(self, engine: Engine, plan: Plan, worker: Worker, runner: Runner, batches: Batches) -> None:
        """Complete the exchange that another worker has completed, if there is one, and count steps by the plan `plan`
        from now on. A worker that joins takes over the model.
        """
        held, joins = self._held, self._joins

        def give() -> dict[str, Any]:
            buffers = engine.buffers(worker.rank)
            return {"params": worker.params, "optimizer": self._stepper.state, "buffers": buffers}

        def take(taken: dict[str, Any]) -> None:
            worker.params[:], self._stepper.state = to_device_of(taken["params"], worker.params), taken["optimizer"]
            engine.restore_buffers(worker.rank, taken["buffers"])

        settle(runner, worker, held, strategy=plan.strategy, joins=joins, also={}, give=give, take=take)
        own: Fields = {"step": worker.step, "former": 0, "total": 0, "common": 0, "block": -1}
        if not joins:
            before, workers, ended = self._plan, self._plan.cluster.workers, held.ended(worker)[1]
            total, common = (before.samples_at(worker.before + n) * workers for n in (worker.step, ended))
            own = {**own, "former": workers, "total": total, "common": common, "block": self._batches.block}
        said = beside(runner, worker, "samples", lambda me: notes_of_all(me, "samples", own))
        stay = [one for one in said.values() if int(one["former"])]
        mean = {name: sum(int(one[name]) for one in stay) / len(stay) for name in ("step", "total", "common")}
        # What a lost worker has computed since the last exchange is in no model. All count alike from here on.
        share = len(stay) / max(int(one["former"]) for one in stay)
        samples = share * mean["total"] + (1 - share) * mean["common"]
        worker.before = plan.steps_of(round(samples)) - int(mean["step"])
        worker.steps = plan.steps - worker.before
        block = max(int(one["block"]) for one in stay)
        batches.restore({FIRST_BATCH: (SamplerState(block + 1), worker.run_step + (not held.completed))})
        # The event of a step that is taken again has been written.
        runner.counted = not held.completed
        runner.metrics.restore({**runner.metrics.kept(), "steps": worker.run_step + runner.counted})

    def _train(self, engine: Engine, plan: Plan, runner: Runner, gradient: FlatArray, repeats: bool) -> None:
        worker, held, stepper, batches = self._worker, self._held, self._stepper, self._batches
        assert worker is not None
        going = runner.advance()
        while going:
            need = runner.waiting
            assert isinstance(need, NeedGradient)
            stepper.lr = plan.lr_at(worker.run_step)
            # If others were lost in the middle of this step, it is taken again.
            if not repeats or held.completed or not held.put_back(gradient):
                indices = batches.next(need)
                if worker.run_step + 1 < plan.steps and (upcoming := batches.upcoming()) is not None:
                    engine.prefetch(indices)
                    engine.prefetch(upcoming)
                self._loss = computed(engine, need, worker.params, indices, gradient, worker.rank, worker.step)
            reach("gradient.computed")
            if repeats:
                held.keep(worker, gradient)
            going = runner.advance(gradient, self._loss)


def repeats_steps(plan: Plan) -> bool:
    """Whether the workers of a job that live take a step again when others are lost."""
    return bool(plan.strategy.repeats) and plan.split is None and not plan.faults


def _run_part(session: Session, engine: Engine, plan: Plan, split: SplitModel) -> None:
    """Take part in a run as the worker that holds one part of one replica."""
    strategy, address = plan.strategy, session.node_spec.address
    servers, parts = plan.cluster.servers, split.partition.parts
    group = groups_of(split.sizes, servers)[address % parts]
    part, rank = split.parts[group.part], address // parts
    name = f"{split.partition.part_name(group.part)} of replica {rank} (worker {address})"
    between = split.largest_message(max(map(plan.batch_at, range(plan.steps))))
    largest = max(part.held_bytes, strategy.largest_message(engine.schema.nbytes), between)
    schema, notes = engine.schema, notes_between(split)
    params = part.take(
        session.meet(
            strategy, plan.optimizer.on_servers, schema, largest=largest, part=NodePart(name, group), notes=notes
        )[1]
    )
    stepper = LocalOptimizer(plan.optimizer, params, part.schema.slices)
    stepper.lr = plan.lr_at(0)
    worker = plan.worker(part, rank, params, stepper)
    release()
    kept, batches = session.load(worker, group), Batches(plan, rank)
    taken = 0 if kept is None else kept.before + kept.step
    given = worker, plan, split, group, batches

    def connect(member: Member) -> PartConnection | JointConnection:
        if isinstance(split, JointModel):
            return JointConnection(member, *given, begins=kept is None)
        return PartConnection(member, *given, taken)

    connection = session.begin(connect)
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
    member_of: Callable[..., Member] | None = None,
) -> int:
    """Take part in a run as a server; return the exit code of the process.

    `group` is the group of the server if the model is split; `index` counts the servers of this group. `member_of`: see
    `Session`.
    """
    with np.errstate(over="ignore", invalid="ignore"), Session(node_spec, None, member_of) as session:
        rule, spec = Strategy.parse(strategy), Optimizer.parse(optimizer)
        spec.load()  # before the others are met, who would wait for the import at their first step
        largest = max(rule.largest_message(schema.nbytes), room_for(optimizer))
        name = node_name(node_spec.address)
        part = None if group is None else NodePart(f"a server of part {group.part} ({name})", group)
        cluster, params = session.meet(rule, spec, schema, largest=largest, part=part)
        if group is not None:
            schema = group.schema(schema)
            params = params.view(schema.dtype)
        node = make_server(rule, cluster, index, params, schema, node_spec.seed, spec)
        session.load(node, group)
        connection = session.begin(lambda member: NodeConnection(member, node, rule, every, group))
        session.start(lambda: connection.runner.serve(rule, node), stops=rule.traits.restarts)
        connection.drive(connection.runner)
        session.leave()
    return session.exit_code


def warm_up(engine: Engine, batch: int) -> None:
    """Compute one gradient of `batch` samples before the clock starts, because the first gradient includes lazy
    initialization.
    """
    params, buffers = engine.home(), engine.buffers(0)
    engine.gradient(params, np.zeros(batch, np.int64), np.zeros(params.shape, params.dtype))
    engine.restore_buffers(0, buffers)
