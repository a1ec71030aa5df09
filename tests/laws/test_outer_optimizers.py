"""OuterOptimizer optimizers against plain numpy: DiLoCo, BMUF, Adam and slow momentum on the mean of the replicas."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.optimizers.adam import Adam
from flockstep.strategies.base import Strategy
from flockstep.strategies.local_sgd import LocalSGD
from flockstep.strategies.outer_optimizers.adam import OuterAdam
from flockstep.strategies.outer_optimizers.bmuf import Bmuf
from flockstep.strategies.outer_optimizers.nesterov import Nesterov
from flockstep.strategies.outer_optimizers.slowmo import SlowMo
from flockstep.testing.strategies import GradientSource, bowl_job, check_strategy, equal_bits, run_strategy, small_job
from support.averaging import local_steps, ring_mean
from support.oracles.slowmo import slowmo

PERIOD, STEPS = 4, 22
F = np.float32


def after(n, move, job=None, steps=STEPS, period=PERIOD):
    """The replicas after `steps`; `move(theta, mean, round)` is the model that follows on `theta`."""
    theta = [GradientSource(n, job).start()]

    def meet(step, w):
        if step % period == 0:
            theta[0] = move(theta[0], ring_mean(w), step // period)
            for replica in w:
                replica[:] = theta[0]

    return local_steps(n, steps, meet, job)


def nesterov(lr, momentum):
    v = np.zeros(18, F)

    def move(theta, mean, _):
        nonlocal v
        delta = theta - mean
        v = F(momentum) * v + delta
        return theta - F(lr) * (delta + F(momentum) * v)

    return move


def adam(lr, beta1, beta2, tau):
    """Reddi et al. 2021, algorithm 2: no correction of the bias, and v starts at tau², the least that they allow."""
    m, v = np.zeros(18, F), np.full(18, tau**2, F)

    def move(theta, mean, _):
        nonlocal m, v
        delta = mean - theta
        m = F(beta1) * m + F(1 - beta1) * delta
        v = F(beta2) * v + F(1 - beta2) * delta**2
        return theta + F(lr) * m / (np.sqrt(v) + F(tau))

    return move


def bmuf(eta, zeta, look_ahead):
    w, change = GradientSource().start(), np.zeros(18, F)

    def move(start, mean, _):
        nonlocal w, change
        change = F(eta) * change + F(zeta) * (mean - start)
        w = w + change
        return w + F(eta) * change if look_ahead else w

    return move


@pytest.mark.oracle("outer_optimizer:nesterov")
@pytest.mark.parametrize("inner", ["sgd(lr=0.1)", "adamw(lr=0.02)"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_nesterov_equals_the_oracle_in_every_bit(n, inner):
    job = small_job(inner)
    run = run_strategy(f"local_sgd({PERIOD}, outer_optimizer=nesterov)", n, STEPS, job=job)
    assert equal_bits(run.replicas, np.stack(after(n, nesterov(0.7, 0.9), job)))


@pytest.mark.oracle("outer_optimizer:adam")
@pytest.mark.parametrize("n", [1, 3])
def test_adam_equals_the_oracle(n):
    run = run_strategy(f"local_sgd({PERIOD}, outer_optimizer=adam)", n, STEPS)
    expected = np.stack(after(n, adam(0.3, 0.9, 0.95, 0.1)))
    assert np.allclose(run.replicas, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.oracle("outer_optimizer:bmuf")
@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_bmuf_equals_the_oracle_in_every_bit(n, ahead):
    run = run_strategy(f"local_sgd({PERIOD}, outer_optimizer=bmuf(zeta=0.8, nesterov={ahead}))", n, STEPS)
    assert equal_bits(run.replicas, np.stack(after(n, bmuf(1 - 1 / n, 0.8, ahead))))


def test_bmuf_hands_out_the_global_model():
    """Chen & Huo 2016: the result is W(t); W(t) + eta Delta(t) is only where Nesterov's replicas begin the next block.

    Between blocks training goes on from there, and a run that goes on after its result was taken does so too.
    """
    outer = "local_sgd(4, outer_optimizer=bmuf(nesterov={}))"
    for steps in (20, 22):
        ahead = np.stack(after(4, bmuf(1 - 1 / 4, 1.0, True), steps=steps))
        run = run_strategy(outer.format(True), 4, steps)
        assert equal_bits(run.replicas, ahead) == (steps == 22)
    state = run_strategy(outer.format(True), 4, 20).nodes[0].state
    assert equal_bits(run_strategy(outer.format(True), 4, 20).replicas[0], state.outer_state.model)
    assert equal_bits(state.model, np.stack(after(4, bmuf(1 - 1 / 4, 1.0, True), steps=20))[0])
    classic = run_strategy("local_sgd(4, outer_optimizer=bmuf)", 4, 20)
    assert equal_bits(classic.replicas, np.stack(after(4, bmuf(1 - 1 / 4, 1.0, False), steps=20)))


def test_bmuf_can_reset_the_momentum_of_the_workers():
    """CNTK's resetSGDMomentum: every block begins with v = 0."""
    job, eta = small_job("sgd(lr=0.1, momentum=0.9)"), F(1 - 1 / 3)
    source = GradientSource(3, job)
    w = [source.start() for _ in range(3)]
    start, model, change, v = source.start(), source.start(), np.zeros(18, F), [np.zeros(18, F) for _ in range(3)]
    for step in range(1, STEPS + 1):
        for rank in range(3):
            v[rank] = F(0.9) * v[rank] + source.gradient(rank, w[rank])
            w[rank] = w[rank] - F(0.1) * v[rank]
        if step % PERIOD == 0:
            change = eta * change + (ring_mean(w) - start)
            model = model + change
            start, w, v = model.copy(), [model.copy() for _ in w], [np.zeros(18, F) for _ in v]
    reset, kept = (
        run_strategy(f"local_sgd({PERIOD}, outer_optimizer=bmuf(reset={text}))", 3, STEPS, job=job).replicas
        for text in (True, False)
    )
    assert np.allclose(reset, np.stack(w), rtol=1e-5, atol=1e-6)
    assert np.abs(kept - reset).max() > 1e-3


def slow_momentum(n, gammas, job, **settings):
    source = GradientSource(n, job)
    shape = n, PERIOD
    return slowmo(source.start(), lambda i, w, _: source.gradient(i, w), gammas, shape=shape, **settings)


@pytest.mark.oracle("outer_optimizer:slowmo")
@pytest.mark.parametrize("strategy", ["local_sgd({}, outer_optimizer={})", "streaming_diloco({}, 1, 0, 0, {})"])
@pytest.mark.parametrize("n", [1, 3])
def test_slowmo_equals_the_oracle_while_the_learning_rate_falls(n, strategy):
    job = bowl_job("sgd(lr=0.2)")
    run = run_strategy(strategy.format(PERIOD, "slowmo(0.8, 0.7)"), n, 24, job=job, schedule="step_decay(0.3, (0.5,))")
    expected = slow_momentum(n, [0.2] * 3 + [0.06] * 3, job, slow=(0.8, 0.7))
    assert np.abs(run.replicas - expected.models[-1]).max() < 1e-13


@pytest.mark.oracle("outer_optimizer:slowmo")
@pytest.mark.parametrize("buffers", ["reset", "maintain"])
def test_slowmo_resets_or_maintains_the_momentum_of_the_workers(buffers):
    job = bowl_job("sgd(lr=0.1, momentum=0.9, nesterov=true)")
    text = f"local_sgd({PERIOD}, outer_optimizer=slowmo(1, 0.6, {buffers == 'reset'}))"
    expected = slow_momentum(3, [0.1] * 5, job, slow=(1.0, 0.6), rho=0.9, nesterov=True, buffers=buffers)
    assert np.abs(run_strategy(text, 3, 20, job=job).replicas - expected.models[-1]).max() < 1e-13


@pytest.mark.oracle("outer_optimizer:average")
@pytest.mark.parametrize("n", [1, 3, 4])
def test_average_equals_the_oracle_in_every_bit(n):
    run = run_strategy(f"local_sgd({PERIOD}, outer_optimizer=average)", n, STEPS)
    assert equal_bits(run.replicas, np.stack(after(n, lambda _, mean, __: mean)))
    assert equal_bits(run.replicas, run_strategy(f"local_sgd({PERIOD})", n, STEPS).replicas)


@pytest.mark.negative_control("outer_optimizer:average")
@pytest.mark.parametrize("outer", ["nesterov", "bmuf", "adam", "nesterov(0.7, 0)"])
def test_other_outer_optimizers_are_not_averaging(outer):
    job = small_job(dtype="float64")
    one, other = (
        run_strategy(f"local_sgd(5, outer_optimizer={name})", 4, job=job).replicas for name in (outer, "average")
    )
    assert np.abs(one - other).max() > 1e-3


@pytest.mark.parametrize("outer", ["average", "nesterov", "adam", "bmuf"])
def test_bytes_are_those_of_the_averages(outer):
    run = run_strategy(f"local_sgd(5, outer_optimizer={outer})", 3, 21)
    assert sum(totals.sent_bytes for totals in run.totals.values()) == 21 // 5 * 2 * 2 * 18 * 4


def test_the_alias_is_the_published_setting():
    diloco = Strategy.parse("diloco")
    assert (diloco.period, diloco.outer_optimizer) == (500, Nesterov(lr=0.7, momentum=0.9))


@pytest.mark.parametrize("outer", ["nesterov", "adam", "bmuf", "slowmo"])
def test_conforms(outer):
    check_strategy(Strategy.parse(f"local_sgd(5, outer_optimizer={outer})"), workers=(1, 2, 3), alone_is_plain=False)


class ForgetsItsMomentum(Nesterov):
    """Wrong optimizer: resets its momentum at every average."""

    def move(self, model, mean, state):
        state.slots["momentum"][:] = 0
        super().move(model, mean, state)


class Corrected(OuterAdam):
    """Corrects the bias of both means, as Adam does and algorithm 2 of Reddi et al. 2021 does not."""

    def start(self, model, workers):
        return Adam(self.lr, self.beta1, self.beta2, self.eps).init(model)

    def move(self, model, mean, state):
        Adam(self.lr, self.beta1, self.beta2, self.eps).step(model, model - mean, state, self.lr)


class FromTheModel(Bmuf):
    """Measures the change from W, not from where the replicas began."""

    def move(self, model, mean, state):
        model[:] = state.model
        super().move(model, mean, state)


class KeepsItsVelocity(SlowMo):
    """Wrong optimizer: does not follow the learning rate, so that v is not γ u."""

    def follow(self, me, state):
        pass


@pytest.mark.negative_control("outer_optimizer:slowmo")
def test_a_velocity_of_an_old_learning_rate_shows():
    job = bowl_job("sgd(lr=0.2)")
    expected = slow_momentum(3, [0.2] * 3 + [0.06] * 3, job, slow=(1.0, 0.6)).models[-1]
    right, wrong = (
        run_strategy(
            LocalSGD(PERIOD, outer_optimizer=kind()), 3, 24, job=job, schedule="step_decay(0.3, (0.5,))"
        ).replicas
        for kind in (SlowMo, KeepsItsVelocity)
    )
    assert np.abs(right - expected).max() < 1e-13
    assert np.abs(wrong - expected).max() > 1e-3


def broken(outer, move):
    replicas = run_strategy(LocalSGD(PERIOD, outer_optimizer=outer), 3, STEPS).replicas
    return np.abs(replicas - np.stack(after(3, move))).max() > 1e-3


@pytest.mark.negative_control("outer_optimizer:nesterov")
def test_a_forgotten_momentum_shows():
    assert broken(ForgetsItsMomentum(), nesterov(0.7, 0.9))


@pytest.mark.negative_control("outer_optimizer:adam")
def test_a_corrected_bias_shows():
    assert broken(Corrected(), adam(0.3, 0.9, 0.95, 0.1))


@pytest.mark.negative_control("outer_optimizer:bmuf")
def test_a_change_measured_from_elsewhere_shows():
    assert broken(FromTheModel(nesterov=True), bmuf(1 - 1 / 3, 1.0, True))
