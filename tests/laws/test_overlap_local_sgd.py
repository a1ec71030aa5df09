"""Overlap local SGD against plain numpy; what it hides, and what its settings make of it."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.strategies.overlap_local_sgd import OverlapLocalSGD
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy
from support.averaging import local_steps, ring_mean


def oracle(n, steps, period, alpha, beta=0.0):
    """n models, each pulled to an anchor that is one period behind their mean."""
    anchor, next_mean, velocity = None, None, 0

    def meet(step, models):
        nonlocal anchor, next_mean, velocity
        if step % period:
            return
        if next_mean is not None:
            velocity = np.float32(beta) * velocity + (next_mean - anchor)
            anchor = anchor + velocity
        for w in models:
            w -= np.float32(alpha) * (w - anchor)
        next_mean = ring_mean(models)

    anchor = GradientSource(n).start()
    return local_steps(n, steps, meet)


@pytest.mark.oracle("strategy:overlap_local_sgd")
@pytest.mark.parametrize(("n", "steps", "period"), [(2, 12, 1), (3, 17, 4), (4, 20, 5), (4, 20, 30)])
@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.0), (1.0, 0.0), (0.5, 0.7)])
def test_equals_the_oracle(n, steps, period, alpha, beta):
    run = run_strategy(f"overlap_local_sgd({period}, {alpha}, {beta})", n, steps)
    for replica, expected in zip(run.replicas, oracle(n, steps, period, alpha, beta), strict=True):
        assert equal_bits(replica, expected)


class Jumps(OverlapLocalSGD):
    """Wrong: waits for the average that it has just begun."""

    async def worker(self, me):
        while me.training:
            me.optimizer_step(await me.gradient())
            if me.step % self.period == 0:
                me.params -= me.params.dtype.type(self.alpha) * (me.params - me.state.model)
                me.state.mean[:] = me.params
                self._begin(me, me.state)
                await self._arrive(me, me.state)


@pytest.mark.negative_control("strategy:overlap_local_sgd")
def test_the_oracle_notices_an_average_that_is_not_late_and_another_alpha():
    """An average in time moves the anchor just as far, so that only the time tells; another alpha does not."""
    expected = np.stack(oracle(3, 20, 5, 0.6))
    assert not equal_bits(run_strategy("overlap_local_sgd(5, 0.5)", 3, 20).replicas, expected)
    options = {"compute": "constant(0.05)", "network": "link(3000, 0.01)"}
    late, waits = (run_strategy(s, 3, 20, **options).seconds for s in (OverlapLocalSGD(5), Jumps(5)))
    assert waits > 1.1 * late


def test_averages_are_hidden_behind_local_steps():
    options = {"compute": "constant(0.05)", "network": "link(3000, 0.01)"}
    overlapped, local, alone = (
        run_strategy(s, 4, 40, **options).seconds for s in ("overlap_local_sgd(10)", "local_sgd(10)", "ensemble")
    )
    assert local - alone > 0.1
    assert overlapped - alone < 0.3 * (local - alone), "all but the last is hidden"
