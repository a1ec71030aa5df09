"""Momentum rules of a server against plain numpy, and the momentum that asynchrony brings by itself."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.errors import CompositionError
from flockstep.optimizers.base import Optimizer
from flockstep.strategies.server_updates.base import ServerUpdate
from flockstep.testing.strategies import equal_bits, small_job
from support.servers import FakeServer, oracle, served

F = np.float32
MOMENTUM = "sgd(lr=0.1, momentum=0.9)"


def ball(mu, weight_decay=0.0):
    speed = {}

    def apply(w, g, tau, backup):
        g = g + F(weight_decay) * w
        speed["v"] = F(mu) * speed["v"] + g if speed else g
        w -= F(0.1) * speed["v"]

    return apply


@pytest.mark.oracle("server_update:momentum_corrected")
@pytest.mark.parametrize(("n", "mu"), [(2, 0.9 - 0.5), (4, 0.9 - 0.75), (16, 0.9 - 0.9375)])
def test_asynchronys_momentum_is_taken_off(n, mu):
    expected = oracle(n, ball(mu, 0.01))
    job = small_job("sgd(lr=0.1, momentum=0.9, weight_decay=0.01)")
    assert equal_bits(served("momentum_corrected", n, job), expected)
    job = small_job("sgd(lr=0.1, momentum=0.3, weight_decay=0.01)")
    assert equal_bits(served("momentum_corrected(0.9)", n, job), expected)


@pytest.mark.negative_control("server_update:momentum_corrected")
def test_the_oracle_notices_momentum_that_is_not_corrected():
    assert not np.allclose(served("momentum_corrected", 4, small_job(MOMENTUM)), oracle(4, ball(0.9)), atol=1e-3)


@pytest.mark.oracle("server_update:negative_momentum")
@pytest.mark.parametrize("mu", [0, -0.25, -0.9])
def test_negative_momentum_is_a_heavy_ball_below_zero(mu):
    assert equal_bits(served(f"negative_momentum({mu})", 4, small_job(MOMENTUM)), oracle(4, ball(mu)))


@pytest.mark.negative_control("server_update:negative_momentum")
def test_the_oracle_notices_the_wrong_sign():
    assert not np.allclose(served("negative_momentum(-0.5)"), oracle(4, ball(0.5)), atol=1e-3)


@pytest.mark.parametrize("rule", ["momentum_corrected", "negative_momentum"])
@pytest.mark.parametrize("optimizer", ["adam(0.01)", "sgd(0.1, momentum=0.9, nesterov=true)"])
def test_momentum_rules_need_the_heavy_ball(rule, optimizer):
    server = FakeServer(np.zeros(3), 0, Optimizer.parse(optimizer))
    with pytest.raises(CompositionError, match="needs sgd without nesterov"):
        ServerUpdate.parse(rule).start(server)
    ServerUpdate.parse(rule).start(FakeServer(np.zeros(3), 0, Optimizer.parse(MOMENTUM)))
