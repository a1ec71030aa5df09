"""One worker alone: strategies with servers of several levels work, too."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.schema import Schema
from flockstep.optimizers.sgd import SGD
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer
from flockstep.strategies.base import Strategy


@pytest.mark.parametrize("leaf", ["synchronous", "asynchronous"])
def test_two_levels_of_servers_serve_a_single_worker(leaf: str) -> None:
    """With one worker a mean is its gradient: plain gradient descent, w <- w - 0.1 g, up to the rate of answers."""
    params, gradients = np.full(4, 2, np.float32), np.zeros(4, np.float32)
    strategy = Strategy.parse(f"hierarchical(leaf={leaf}, root={leaf})")
    loop = Loop(params, gradients, Schema.of({"w": (4,)}), strategy, LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1))
    for step in range(5):
        loop.gradients[:] = step
        loop.step()
    loop.finish()
    np.testing.assert_allclose(params, 2 - 0.1 * (0 + 1 + 2 + 3 + 4), rtol=1e-6)
