"""Rules that take the first gradients of a version: who was late has skipped versions, and must come to its end too."""

from __future__ import annotations

import pytest

from flockstep.records.events import Step
from flockstep.testing.strategies import run_strategy


@pytest.mark.parametrize("rule", ["backup(6)", "k_sync(2)", "k_batch_sync(2)"])
@pytest.mark.parametrize("seed", range(4))
def test_late_workers_finish_when_too_few_are_left(rule: str, seed: int) -> None:
    """Messages queue up at the server for as long as gradients take, while versions come and go."""
    network = "link(bandwidth=1e5, latency=0.0001)"
    run = run_strategy(f"ps({rule})", 8, 40, compute="lognormal(0.01, sigma=1)", network=network, seed=seed)
    assert len(run.of(Step)) == 8 * 40
    assert all(node.step == 40 for address, node in run.nodes.items() if address >= 0)
