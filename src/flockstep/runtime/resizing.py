"""Computes the state of a run with another number of workers from the states of the nodes of the former run."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import msgspec
import numpy as np

from flockstep.arrays.namespace import copied, to_device_of, to_host
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import CompositionError
from flockstep.frameworks.base import Engine, TrainedModel
from flockstep.messages import Address, server
from flockstep.optimizers.base import Optimizer
from flockstep.runtime.cut import Cut, cut_of
from flockstep.runtime.fault_injector import remaining_faults
from flockstep.runtime.node_creation import make_server
from flockstep.runtime.node_metrics import NodeMetrics
from flockstep.runtime.plan import FIRST_BATCH, LocalOptimizer, Plan
from flockstep.runtime.runner import reporting_users_errors
from flockstep.runtime.virtual import Simulation
from flockstep.simulation import USUAL_COMPUTE, USUAL_NETWORK
from flockstep.simulation.attacks import Memory, WrongGradient
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy
from flockstep.strategies.resizing import FormerWorker, keep
from flockstep.workloads.sampler import SamplerState

T = TypeVar("T")


@reporting_users_errors("computing the state of the changed run")
def resized_checkpoint(
    engine: Engine,
    plan: Plan,
    now: Plan,
    kept: Mapping[Address, Cut],
    order: Sequence[int],
    lost: Collection[int] = (),
) -> dict[Address, Cut]:
    """Return the states from which the nodes of plan `now` continue a run of `plan` with a different number of workers.

    `order` lists the former ranks of the workers in the order of their new ranks; if there are fewer workers now, the
    workers at the end of the list leave. `kept` lacks the states of lost workers, which had taken `lost` steps. Each
    worker's step count is converted so that all workers together keep their total number of samples.

    Raises:
        RunError: the strategy, or another component of the user, raised an error.
    """
    network, compute = Network.parse(USUAL_NETWORK), ComputeModel.parse(USUAL_COMPUTE)
    alone = replace(plan, cluster=replace(plan.cluster, replicas=0))  # the backups' states are those of their servers
    ended = Simulation(engine, alone, compute, network, lambda event: None)
    former = _renamed(ended.drain(_that_can_end(plan.strategy, kept)), order)
    kept = {
        address: msgspec.structs.replace(
            one, memories=_memories(plan, former_address, one), strikes=Counter(_renamed(one.strikes, order))
        )
        for address, (former_address, one) in _renamed({old: (old, one) for old, one in kept.items()}, order).items()
    }
    steps = [*lost, *(one.before + one.step for address, one in kept.items() if address >= 0)]
    before = min(now.steps - 1, now.steps_of(sum(map(plan.samples_at, steps))))
    states = resized(engine, now, former, before)
    return {address: _checkpoint(address, saved, now, before, kept) for address, saved in states.items()}


def _that_can_end(strategy: Strategy, kept: Mapping[Address, Cut]) -> dict[Address, Cut]:
    """The states of the nodes, without the exchanges that not every worker has begun."""
    saved = {address: copy.deepcopy(one) for address, one in kept.items()}
    least = min(one.step for address, one in saved.items() if address >= 0)
    for address, one in saved.items():
        if address >= 0:
            strategy.forget(one.state, one.step, least)
    return saved


def faults_after(plan: Plan, kept: Mapping[Address, Cut], order: Sequence[int], workers: int) -> tuple[str, ...]:
    """Return the faults with which a run of `plan`, whose nodes have the states `kept`, continues with `workers`
    workers.

    A fault stays with its worker when the worker's rank changes, and ends when the worker leaves. `order` is as in
    `resized_checkpoint`.
    """
    ranks = {old: new for new, old in enumerate(order) if new < workers}
    steps = {address: one.step for address, one in kept.items()}
    return tuple(map(str, remaining_faults(plan.faults, steps, ranks)))


def _memories(plan: Plan, address: Address, kept: Cut) -> list[Memory]:
    """What those faults of a worker's gradients keep that are not over."""
    own = [fault for fault in plan.faults if isinstance(fault, WrongGradient) and fault.worker == address]
    return [one for fault, one in zip(own, kept.memories, strict=True) if fault.after(kept.step, address)]


def _renamed(of: Mapping[Address, T], order: Sequence[int]) -> dict[Address, T]:
    """What belongs to nodes, by their new addresses; `order`: former ranks of the workers."""
    names = dict(enumerate(order)) | {address: address for address in of if address < 0}
    return {new: of[old] for new, old in names.items() if old in of}


def resized(engine: Engine, plan: Plan, former: Mapping[Address, Cut], before: int = 0) -> dict[Address, Cut]:
    """Return the initial states of the nodes of `plan`, which the strategy derives from the states of the former nodes.

    Args:
        engine: the engine of the job.
        plan: the plan with the new number of workers. former: the states of the former nodes, whose programs have
            ended. before: number of steps of each worker of `plan` that correspond to the run so far.
    """
    strategy = plan.strategy
    require_resizable(strategy)
    workers = [
        FormerWorker(rank, saved.params, saved.step, saved.state, saved.optimizer)
        for rank, saved in sorted(former.items())
        if rank >= 0
    ]
    common = _common_model(strategy, workers, former)
    replicas = _replicas(strategy, plan.cluster.workers, workers, common)
    blocks = [state.block for saved in former.values() for state, _ in saved.batches.values()]
    first = {FIRST_BATCH: (SamplerState(max(blocks, default=-1) + 1), before)}
    states = {}
    for rank in range(plan.cluster.workers):
        saved = _worker(engine, plan, rank, replicas[rank], workers)
        kept = former[rank].random if rank < len(workers) else saved.random
        states[rank] = msgspec.structs.replace(saved, batches=first, random=kept)
    for index in range(plan.cluster.servers):
        states[server(index)] = _server(engine, plan, index, common, former[server(index)])
    return copy.deepcopy(states)


def require_resizable(strategy: Strategy, instead: str = "resume the run without -n") -> None:
    """Raise `CompositionError` if the strategy has no rule for another number of workers.

    `instead` ends the error's sentence with the way out.
    """
    if why := strategy.resizing.refused:
        raise CompositionError(
            f"a run with {strategy} cannot continue with another number of workers, because {why}; {instead}"
        )


def _common_model(strategy: Strategy, workers: Sequence[FormerWorker], former: Mapping[Address, Cut]) -> FlatArray:
    """The parameters of the servers, or the weighted mean of the replicas."""
    if strategy.traits.results[0] != "server":
        return _mean([strategy.replica(one) for one in workers])
    whole = copied(workers[0].params)
    held = strategy.held(len(workers), len(whole))
    for index in reversed(range(len(held))):
        whole[held[index]] = former[server(index)].params
    return whole


def _mean(replicas: Sequence[tuple[FlatArray, float]]) -> FlatArray:
    """The weighted mean of arrays (K,); equal arrays have themselves as their mean."""
    reference = to_host(replicas[0][0])
    offset = np.zeros(len(reference))
    for array, weight in replicas:
        offset += weight * (to_host(array).astype(np.float64) - reference)
    mean = reference + offset / sum(weight for _, weight in replicas)
    return to_device_of(mean.astype(reference.dtype), replicas[0][0])


def _replicas(strategy: Strategy, count: int, workers: Sequence[FormerWorker], common: FlatArray) -> list[FlatArray]:
    """The replicas with which `count` workers begin, by the strategy's rule."""
    if strategy.resizing.replicas == "common":
        return [common] * count
    remaining = [strategy.replica(one)[0] for one in workers[:count]]
    if strategy.traits.results[0] != "server":
        shift = common - _mean([(array, 1.0) for array in remaining])
        remaining = [array + shift for array in remaining]
    return [*remaining, *[common] * (count - len(remaining))]


def _worker(engine: Engine, plan: Plan, rank: int, replica: FlatArray, former: Sequence[FormerWorker]) -> Cut:
    """The state of a worker; one that joins has the state that a worker's program starts with."""
    strategy, params = plan.strategy, copied(replica)
    stepper = LocalOptimizer(plan.optimizer, params, engine.schema.slices)
    worker = plan.worker(engine, rank, params, stepper)
    stays = rank < len(former)
    one = former[rank if stays else 0]
    worker.state = copy.deepcopy(one.state)  # what outlasts a restart of the programs
    worker.state = strategy.worker_state(worker)
    strategy.take_over(worker, former)
    if stays or strategy.traits.alike:
        stepper.state = copy.deepcopy(one.optimizer)
    return cut_of(worker, stepper, None, messages=False)


def _server(engine: Engine, plan: Plan, index: int, common: FlatArray, former: Cut) -> Cut:
    """The state of a server: its optimizer goes on, its program begins anew."""
    strategy = plan.strategy
    node = make_server(strategy, plan.cluster, index, common, engine.schema, plan.seed, plan.optimizer.on_servers)
    node.optimizer_state, node.state = copy.deepcopy(former.optimizer), copy.deepcopy(former.state)
    node.state = strategy.master_state(node)
    keep(node.state, former.state, strategy.resizing.server)
    return msgspec.structs.replace(cut_of(node, None, None, messages=False), random=former.random)


def _checkpoint(address: Address, saved: Cut, plan: Plan, before: int, kept: Mapping[Address, Cut]) -> Cut:
    """The checkpoint of a node with its new state; a worker that joins has taken part in nothing so far."""
    old = kept.get(address)
    totals = {**(NodeMetrics(address, None).kept() if old is None else old.totals), "steps": before}
    strikes = Counter() if old is None else Counter({r: n for r, n in old.strikes.items() if r < plan.cluster.workers})
    worker = address >= 0
    return msgspec.structs.replace(
        saved,
        before=before if worker else 0,
        lr=plan.lr_at(before) if worker else 0.0,
        loss=0.0 if old is None else old.loss,
        buffers=kept[0].buffers if old is None else old.buffers,
        totals=totals if worker else {**totals, "steps": 0},
        memories=[] if old is None else old.memories,
        strikes=strikes,
    )


class _ScriptModel(TrainedModel):
    """The model of a script, which computes gradients in the script's processes only."""

    train_size = 0

    def __init__(self, schema: Schema, params: FlatArray):
        self.schema, self._params = schema, params

    def initial(self) -> FlatArray:
        return copied(self._params)


def require_script_resizable(strategy: Strategy, instead: str = "resume the run without -n") -> None:
    """Raise `CompositionError` if a script with this strategy cannot continue with another number of workers.

    `instead` ends the error's sentence with the way out.
    """
    require_resizable(strategy, instead)
    why = ""
    if strategy.resizing.steps_at_end:
        why = "its workers step once more at the end, which the script's optimizer can do in the script only"
    elif strategy.traits.memory == "slices":
        why = "each worker holds a slice of the state of the script's optimizer"
    if why:
        raise CompositionError(
            f"a script with {strategy} cannot continue with another number of workers, because {why}; {instead}"
        )


def script_plan(strategy: Strategy, rule: str, workers: int, seed: int) -> Plan:
    """Return the plan of a script's run: a budget that never ends, and steps of one sample.

    `rule` is the script's optimizer in the form that servers execute, as text.
    """
    parts = [np.empty(0, np.int64)] * workers
    optimizer, cluster, result = Optimizer.parse(rule), strategy.cluster(workers), strategy.traits.results[0]
    return Plan(strategy, cluster, optimizer, parts, 1, sys.maxsize, seed, result, evaluate_every=0)


def resized_scripts(
    plan: Plan,
    now: Plan,
    kept: Mapping[Address, Cut],
    order: Sequence[int],
    lost: Collection[int] = (),
) -> dict[Address, Cut]:
    """Return the states from which the nodes of plan `now` continue a script's run of `plan`; see `resized_checkpoint`
    for `order` and `lost`.

    A worker that joins has the values that the script of worker `order[0]` stored, and that worker's state of the
    optimizer if all workers step along the same gradient. A worker that was ahead of worker `order[0]` stays as many
    steps ahead, because its script is, with its learning-rate schedule.
    """
    first = kept[order[0]]
    model = _ScriptModel(first.at_boundary.schema, first.params)
    states = resized_checkpoint(cast(Engine, model), plan, now, kept, order, lost)  # computes no gradient
    for rank in range(now.cluster.workers):
        joins = rank >= len(order)
        former = kept[order[0 if joins else rank]]
        content = former.at_boundary
        if joins and not plan.strategy.traits.alike:
            content = replace(content, states=[{} for _ in content.states])
        before = max(0, states[rank].before + _place(former) - _place(first))
        totals = {**states[rank].totals, "steps": before}
        states[rank] = msgspec.structs.replace(
            states[rank], before=before, totals=totals, at_boundary=content, script=former.script, joins=joins
        )
    return states


def _place(kept: Cut) -> int:
    """Number of steps that the script of a worker has taken."""
    return kept.before + kept.step
