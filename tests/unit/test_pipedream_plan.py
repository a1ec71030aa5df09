"""PipeDream's planner against all pipelines, one by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest

from flockstep.costs.stages import PipeDreamPlan, PlannedStage, even_plan, pipedream_plan
from flockstep.errors import ConfigurationError

BANDWIDTH = 10.0


def pipelines(layers: int, workers: int) -> Iterator[list[tuple[int, int, int]]]:
    """First layer, last layer and workers of each stage, of every pipeline that uses all workers."""
    for count in range(1, min(layers, workers) + 1):
        for cuts in combinations(range(1, layers), count - 1):
            ends = [0, *cuts, layers]
            for sizes in product(range(1, workers + 1), repeat=count):
                if sum(sizes) == workers:
                    yield [(ends[i], ends[i + 1] - 1, sizes[i]) for i in range(count)]


def slowest(stages, seconds, outputs, weights) -> float:
    """The paper's formulas: the time of the slowest stage or link per mini-batch."""
    found = []
    for first, last, m in stages:
        sent = 2 * (m - 1) * sum(weights[first : last + 1]) / BANDWIDTH
        found.append(max(sum(seconds[first : last + 1]), sent) / m)
    found += [2 * outputs[last] / BANDWIDTH for _, last, _ in stages[:-1]]
    return max(found)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("workers", [2, 4, 5])
def test_the_plan_is_the_best_of_all_pipelines(seed: int, workers: int) -> None:
    random = np.random.default_rng(seed)
    facts = random.uniform(0.1, 2, 5), random.uniform(0, 8, 5), random.uniform(0, 8, 5)
    plan = pipedream_plan(*facts, workers, BANDWIDTH)
    best = min(slowest(stages, *facts) for stages in pipelines(5, workers))
    assert plan.seconds == pytest.approx(best)
    mine = [(one.first, one.last, one.replicas) for one in plan.stages]
    assert mine in list(pipelines(5, workers))
    assert slowest(mine, *facts) == pytest.approx(best)


@pytest.mark.parametrize("workers", [4, 6])
def test_the_even_plan_is_the_best_of_those_with_equal_stages(workers: int) -> None:
    random = np.random.default_rng(7)
    facts = random.uniform(0.1, 2, 6), random.uniform(0, 8, 6), random.uniform(0, 8, 6)
    even = [stages for stages in pipelines(6, workers) if len({m for _, _, m in stages}) == 1]
    plan = even_plan(*facts, workers, BANDWIDTH)
    assert plan.seconds == pytest.approx(min(slowest(stages, *facts) for stages in even))
    assert plan.seconds >= pipedream_plan(*facts, workers, BANDWIDTH).seconds


def test_small_weights_are_replicated_and_small_outputs_cut() -> None:
    """Two layers of 1 s on two workers: two replicas if weights are free, two stages if outputs are."""
    replicas = PipeDreamPlan((PlannedStage(0, 1, 2),), 1.0)
    stages = PipeDreamPlan((PlannedStage(0, 0, 1), PlannedStage(1, 1, 1)), 1.0)
    assert pipedream_plan([1, 1], [100, 0], [0, 0], 2, BANDWIDTH) == replicas
    assert pipedream_plan([1, 1], [0, 0], [100, 100], 2, BANDWIDTH) == stages


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a plan needs layers and workers, got 0 and 2"):
        pipedream_plan([], [], [], 2, BANDWIDTH)
    with pytest.raises(
        ConfigurationError, match="2 layers on 4 workers do not form a pipeline of stages with 1 workers"
    ):
        pipedream_plan([1, 1], [1, 1], [1, 1], 4, BANDWIDTH, replicas=1)
    assert math.isfinite(even_plan([1, 1], [1, 1], [1, 1], 4, BANDWIDTH).seconds)
