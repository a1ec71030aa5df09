"""The plan of a run: all resolved settings that a driver needs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flockstep.arrays.factors import FactoredWeight
from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError
from flockstep.frameworks.base import DistillationTargets, Engine, Indices, TrainedModel
from flockstep.nodes import BadGradients, Cluster, Worker
from flockstep.optimizers.base import Optimizer
from flockstep.programs import NeedGradient, Stepper
from flockstep.runtime.node_creation import DeclaredWork, Stepping, make_worker
from flockstep.schedules.timetable import Timetable
from flockstep.simulation.faults import Fault
from flockstep.split.stages import SplitModel
from flockstep.strategies.base import ResultPolicy, Strategy
from flockstep.workloads.sampler import Sampler, SamplerState


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The plan of one run: strategy, cluster, budget and seed. `parts[rank]` holds the indices of a worker's training
    samples.
    """

    strategy: Strategy
    cluster: Cluster
    optimizer: Optimizer
    parts: Sequence[Indices]
    batch: int
    steps: int
    seed: int
    result: ResultPolicy
    evaluate_every: int
    """Number of steps of a worker between two evaluations of the model; evaluations take no time on the run's clock."""
    timetable: Timetable | None = None
    """Schedule of learning rate and batch size; None if both are constant."""

    bad_gradients: BadGradients = field(default_factory=BadGradients)
    faults: tuple[Fault, ...] = ()
    """Faults that are injected into the run."""
    split: SplitModel | None = None
    """The model cut into parts; None if every worker holds a whole replica."""

    def __post_init__(self) -> None:
        require_steppable(self.strategy, self.optimizer)

    def lr_at(self, step: int) -> float:
        """Learning rate for a worker's gradient after `step` earlier gradients."""
        return self.optimizer.lr if self.timetable is None else self.timetable.lr_at(step)

    def batch_at(self, step: int) -> int:
        """Number of samples in a worker's gradient after `step` earlier gradients."""
        return self.batch if self.timetable is None else self.timetable.batch_at(step)

    def samples_at(self, step: int) -> int:
        """Number of samples that a worker has used in its first `step` gradients."""
        return step * self.batch if self.timetable is None else self.timetable.samples_at(step)

    def steps_of(self, samples: int) -> int:
        """Number of steps in which all workers together use at most so many samples."""
        return bisect_right(range(1, self.steps + 1), samples, key=lambda n: self.samples_at(n) * self.cluster.workers)

    def layers(self, engine: TrainedModel) -> tuple[FactoredWeight, ...]:
        """The layers whose gradients can be computed as factors.

        Raises:
            CompositionError: the schedule changes the batch size, and so the size of the factors.
        """
        if self.timetable is not None and self.timetable.grows:
            raise CompositionError(
                f"factors of gradients need batches of a constant size, got the schedule {self.timetable.schedule}; "
                "use a schedule that changes only the learning rate"
            )
        return engine.layers(self.batch)

    def held(self, size: int) -> list[slice]:
        """Slice of the parameters that each server holds."""
        return self.strategy.held(self.cluster.workers, size)

    def worker(self, engine: TrainedModel, rank: int, params: FlatArray, stepper: Stepper) -> Worker:
        """Create a worker of this run, whose live replica is `params`."""
        stepping = Stepping(stepper, self.optimizer)
        samples, batch = len(self.parts[rank]), self.batch_at(0)
        work = DeclaredWork(self.steps, engine.train_size, samples, batch, lambda: self.layers(engine))
        worker = make_worker(self.strategy, self.cluster, rank, params, engine.schema, self.seed, stepping, work)
        worker.bad_gradients = self.bad_gradients
        return worker


def require_steppable(strategy: Strategy, optimizer: Optimizer) -> None:
    """Raise `CompositionError` if nodes of the strategy update slices of the parameters, but the optimizer needs whole
    layers.
    """
    if strategy.traits.server_optimizer and not optimizer.elementwise:
        raise CompositionError(
            f"{strategy} updates slices of the parameters, got {optimizer}, which needs whole layers; "
            "use an elementwise optimizer such as sgd, or a strategy whose workers update the parameters, such "
            "as all_reduce"
        )


def whole_cluster(group: Cluster, parts: int) -> Cluster:
    """Return the cluster of a run of a split model in which each of `parts` parts has a group of nodes like `group`.

    The worker of replica r and part p has rank r × parts + p; the servers of a part follow the servers of the previous
    part.
    """
    beside = tuple(rank * parts + part for part in range(parts) for rank in group.beside)
    return Cluster(group.workers * parts, group.servers * parts, beside, group.replicas)


def require_parts(strategy: Strategy, instead: str) -> None:
    """Check that nodes that hold the parts of a split model can follow a strategy; `instead` is what users may choose
    in place of the parts.

    Raises:
        CompositionError: the strategy needs whole models.
    """
    traits = strategy.traits
    if not traits.fixed_steps or not traits.plain_gradients:
        needed = (
            "whose number of steps is fixed"
            if traits.plain_gradients
            else "whose workers compute only the gradient of their next batch"
        )
        raise CompositionError(
            f"a split model needs a strategy {needed}, got {strategy}; use a strategy such as local_sgd, or {instead}"
        )
    if strategy.replicas:
        raise CompositionError(
            f"servers of a split model have no backups yet, got {strategy}; leave the backups out, or use {instead}"
        )


def require_splittable(plan: Plan) -> None:
    """Check that the plan of a run can be followed on the parts of a split model.

    Raises:
        CompositionError: the strategy, the optimizer or the handling of bad gradients needs whole models.
    """
    require_parts(plan.strategy, "partition=none")
    if not plan.optimizer.elementwise or plan.optimizer.by_place:
        raise CompositionError(
            f"the stages of a split model update their own parameters, got {plan.optimizer}, which needs the whole "
            "model; use an elementwise optimizer such as sgd, or partition=none"
        )
    if plan.bad_gradients.action != "stop" or plan.bad_gradients.max_norm is not None:
        raise CompositionError(
            f"on_bad_gradient={plan.bad_gradients.action} and max_gradient_norm need whole gradients, but a stage of "
            f"a split model has only a part; leave these settings out, or use partition=none"
        )


FIRST_BATCH = -1
"""Key, in the state of `Batches`, of the position at which the reading of a new block of data begins."""


class Batches:
    """Draws the samples of a worker's gradients: batches of the worker's own part of the data, or samples that the
    worker names.
    """

    def __init__(self, plan: Plan, rank: int):
        self._plan = plan
        self._rank = rank
        self._samplers: dict[int, Sampler] = {}
        self._turns: dict[int, int] = {}
        self._first = SamplerState(), 0
        """Position, and number of earlier batches, at which a block begins."""

    def next(self, need: NeedGradient) -> Indices:
        """Return the indices of the samples of the requested gradient.

        The n-th batch of a block of data is the same for all workers.
        """
        if need.samples is not None:
            return np.arange(*need.samples, dtype=np.int64)
        block, turns = self._rank if need.block is None else need.block, self._turns
        if block not in turns or need.turn is not None:
            self._go_to(block, need.turn)
        turn = turns[block]
        turns[block] = turn + 1
        return self._samplers[block].next(self._plan.batch_at(turn))

    def _go_to(self, block: int, turn: int | None) -> None:
        """Continue a block of data at batch number `turn`; None begins the block."""
        first = self._first[1]
        target = first + (turn or 0)
        if block not in self._turns or target < self._turns[block]:
            self._begin(block, *self._first)
        for skipped in range(self._turns[block], target):
            self._samplers[block].next(self._plan.batch_at(skipped))
        self._turns[block] = target

    def upcoming(self) -> Indices | None:
        """Return the indices of the batch that follows the last one, provided that the worker requests no other batch;
        None if they are not known yet.
        """
        if (sampler := self._samplers.get(self._rank)) is None:
            return None
        return sampler.peek(self._plan.batch_at(self._turns[self._rank]))

    @property
    def block(self) -> int:
        """Number of the newest block of permutations of which a batch was drawn; -1 before the first batch."""
        return max((sampler.state().block for sampler in self._samplers.values()), default=self._first[0].block - 1)

    def state(self) -> dict[int, tuple[SamplerState, int]]:
        """Return, for every block of data that the worker has read, block → position in the block."""
        read = {block: (sampler.state(), self._turns[block]) for block, sampler in self._samplers.items()}
        return {FIRST_BATCH: self._first, **read}

    def restore(self, state: dict[int, tuple[SamplerState, int]]) -> None:
        """Continue to draw batches from a saved position."""
        self._first = state.get(FIRST_BATCH, self._first)
        for block, (saved, turn) in state.items():
            if block != FIRST_BATCH:
                self._begin(block, saved, turn)

    def _begin(self, block: int, state: SamplerState, turn: int) -> None:
        plan = self._plan
        self._samplers[block] = Sampler(plan.parts[block], plan.batch, plan.seed, block, state)
        self._turns[block] = turn


def computed(
    engine: Engine, need: NeedGradient, params: FlatArray, indices: Indices, out: FlatArray, rank: int, step: int
) -> float:
    """Compute the gradient that a worker has requested, write it into `out` (K,), and return the mean loss of the
    samples.
    """
    if need.layers:
        return engine.factored(params, indices, need.layers, out, rank, step)
    if need.teachers:
        return engine.distil(
            params, indices, out, DistillationTargets(namespace(params).stack(need.teachers), need.weight), rank, step
        )
    return engine.gradient(params, indices, out, rank, step)


class LocalOptimizer:
    """A worker's optimizer: an `Optimizer` with the state of one replica."""

    def __init__(self, optimizer: Optimizer, params: FlatArray, tensors: Sequence[slice] = ()):
        """`tensors`: the slice of each of the model's tensors in `params`."""
        self.lr = optimizer.lr
        """Learning rate of the next step; drivers set it by the schedule before every gradient."""
        self._optimizer = optimizer
        self._tensors = tuple(tensors)
        self.reset(params)

    @property
    def settings(self) -> tuple[str, list[dict[str, Any]]]:
        """Name of the optimizer, and the settings of its only group."""
        return type(self._optimizer).__name__, [{"lr": self.lr}]

    def step(self, params: FlatArray, gradient: FlatArray, in_place: bool = False) -> None:
        """Update `params` (K,) in place with `gradient` (K,)."""
        self._optimizer.step(params, gradient, self.state, self.lr)

    def reset(self, params: FlatArray) -> None:
        """Reset the optimizer's state, for example the momentum, to its initial value."""
        self.state = self._optimizer.init(params)
        self.state.tensors = self._tensors
