"""Computes the states with which a script's workers continue a run with another number of workers."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import CompositionError
from flockstep.frameworks.base import Engine, TrainedModel
from flockstep.messages import Address
from flockstep.optimizers.base import Optimizer
from flockstep.runtime.checkpoints import NodeCheckpoint
from flockstep.runtime.plan import Plan
from flockstep.runtime.resizing import require_resizable, resized_checkpoint
from flockstep.strategies.base import Strategy


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
    kept: Mapping[Address, NodeCheckpoint],
    order: Sequence[int],
    lost: Collection[int] = (),
) -> dict[Address, NodeCheckpoint]:
    """Return the states from which the nodes of plan `now` continue a script's run of `plan`; see `resized_checkpoint`
    for `order` and `lost`.

    A worker that joins has the values that the script of worker `order[0]` stored, and that worker's state of the
    optimizer if all workers step along the same gradient. A worker that was ahead of worker `order[0]` stays as many
    steps ahead, because its script is, with its learning-rate schedule.
    """
    first = kept[order[0]]
    model = _ScriptModel(first.at_boundary.schema, first.saved.params)
    states = resized_checkpoint(cast(Engine, model), plan, now, kept, order, lost)  # computes no gradient
    for rank in range(now.cluster.workers):
        joins = rank >= len(order)
        former = kept[order[0 if joins else rank]]
        content = former.at_boundary
        if joins and not plan.strategy.traits.alike:
            content = replace(content, states=[{} for _ in content.states])
        before = max(0, states[rank].before + _place(former) - _place(first))
        totals = {**states[rank].totals, "steps": before}
        states[rank] = replace(
            states[rank], before=before, totals=totals, at_boundary=content, script=former.script, joins=joins
        )
    return states


def _place(kept: NodeCheckpoint) -> int:
    """Number of steps that the script of a worker has taken."""
    return kept.before + kept.saved.step
