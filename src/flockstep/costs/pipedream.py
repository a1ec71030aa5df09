"""PipeDream's planner, which divides a network into stages of consecutive layers, each held by several workers
(Narayanan et al., PipeDream, SOSP 2019, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from flockstep.errors import ConfigurationError


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a pipeline: the consecutive layers `first` to `last`, held by `replicas` workers."""

    first: int
    last: int
    replicas: int


Stages = tuple[PlannedStage, ...]
"""Type of the stages of a pipeline, in the order of their layers."""


@dataclass(frozen=True)
class PipeDreamPlan:
    """The stages that PipeDream's planner chooses, and the predicted time."""

    stages: Stages
    seconds: float
    """Predicted seconds that the slowest stage or link takes for a mini-batch."""


def pipedream_plan(
    seconds: Sequence[float],
    outputs: Sequence[float],
    weights: Sequence[float],
    workers: int,
    bandwidth: float,
    replicas: int | None = None,
) -> PipeDreamPlan:
    """Return the stages of the pipeline whose slowest stage or link takes the least time for a mini-batch.

    A stage of the layers i to j on m workers takes T(i, j, m) = max(Σ T_l, 2 (m - 1) Σ |w_l| / B) / m, and a link
    between two stages 2 a_l / B. With A(j, m) for the best pipeline of the layers up to j on m workers:

        A(j, m) = min(T(0, j, m), min over i, m' of max(A(i, m - m'), 2 a_i / B, T(i + 1, j, m')))

    Args:
        seconds: T_l, seconds of the forward and backward pass of each layer over a mini-batch.
        outputs: a_l, bytes of the outputs of each layer for a mini-batch.
        weights: |w_l|, bytes of the weights of each layer.
        workers: number of workers; the plan uses all of them.
        bandwidth: B, bytes per second of every link.
        replicas: number of workers of every stage; None lets every stage have a different number.

    Raises:
        ConfigurationError: there are no layers, or no pipeline of these layers uses all workers.
    """
    layers = len(seconds)
    if not layers or workers < 1:
        raise ConfigurationError(
            f"a plan needs layers and workers, got {layers} and {workers}; give at least one of each"
        )
    time, size = [0.0, *accumulate(seconds)], [0.0, *accumulate(weights)]

    def stage(first: int, last: int, count: int) -> float:
        if replicas not in (None, count):
            return math.inf
        sent = 2 * (count - 1) * (size[last + 1] - size[first]) / bandwidth
        return max(time[last + 1] - time[first], sent) / count

    best: dict[tuple[int, int], tuple[float, Stages]] = {}
    for last in range(layers):
        for count in range(1, workers + 1):
            whole: Stages = (PlannedStage(0, last, count),)
            options = [(stage(0, last, count), whole)]
            for before in range(last):
                link = 2 * outputs[before] / bandwidth
                for mine in range(1, count):
                    earlier, stages = best[before, count - mine]
                    slowest = max(earlier, link, stage(before + 1, last, mine))
                    options.append((slowest, (*stages, PlannedStage(before + 1, last, mine))))
            best[last, count] = min(options, key=lambda option: (option[0], len(option[1])))
    found, stages = best[layers - 1, workers]
    if not found < math.inf:
        raise ConfigurationError(
            f"{layers} layers on {workers} workers do not form a pipeline of stages with {replicas} workers each; "
            f"use a "
            "divisor of the number of workers, and at most as many stages as layers"
        )
    return PipeDreamPlan(stages, found)


def even_plan(
    seconds: Sequence[float], outputs: Sequence[float], weights: Sequence[float], workers: int, bandwidth: float
) -> PipeDreamPlan:
    """Return the best pipeline whose stages all have the same number of workers, as the stages of every `pipeline(…)`
    have.

    The arguments have the same meaning as in `pipedream_plan`.
    """
    counts = [count for count in range(1, workers + 1) if not workers % count and workers // count <= len(seconds)]
    plans = [pipedream_plan(seconds, outputs, weights, workers, bandwidth, count) for count in counts]
    return min(plans, key=lambda plan: (plan.seconds, len(plan.stages)))
