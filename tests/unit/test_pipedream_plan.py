"""PipeDream's planner against all pipelines, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest

from flockstep.costs.stages import pipedream_plan

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
@pytest.mark.parametrize("workers", [2, 4, 5, 6])
def test_the_plan_is_the_best_of_all_pipelines_with_equal_stages(seed: int, workers: int) -> None:
    random = np.random.default_rng(seed)
    facts = random.uniform(0.1, 2, 6), random.uniform(0, 8, 6), random.uniform(0, 8, 6)
    even = [stages for stages in pipelines(6, workers) if len({m for _, _, m in stages}) == 1]
    firsts = pipedream_plan(*facts, workers, BANDWIDTH)
    (mine,) = [stages for stages in even if tuple(first for first, _, _ in stages) == firsts]
    assert slowest(mine, *facts) == pytest.approx(min(slowest(stages, *facts) for stages in even))


def test_small_weights_are_replicated_and_small_outputs_cut() -> None:
    """Two layers of 1 s on two workers: two replicas if weights are free, two stages if outputs are."""
    assert pipedream_plan([1, 1], [100, 0], [0, 0], 2, BANDWIDTH) == (0,)
    assert pipedream_plan([1, 1], [0, 0], [100, 100], 2, BANDWIDTH) == (0, 1)
    assert pipedream_plan([1, 1], [1, 1], [1, 1], 4, BANDWIDTH), "more workers than layers"
