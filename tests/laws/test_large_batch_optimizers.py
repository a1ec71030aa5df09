"""LARS and LAMB: against plain numpy, their laws, and who may use them."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.errors import CompositionError
from flockstep.frameworks.numpy import NumpyEngine
from flockstep.optimizers import Optimizer, OptimizerState
from flockstep.optimizers.lamb import LAMB
from flockstep.optimizers.lars import LARS
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy, small_job

LAYERS = (slice(0, 12), slice(12, 15), slice(15, 40))
SETTINGS = [
    LARS(lr=2.0),
    LARS(lr=2.0, momentum=0.0),
    LARS(lr=4.0, weight_decay=0.05, trust=0.01),
    LAMB(lr=0.05),
    LAMB(lr=0.05, beta1=0.8, weight_decay=0.0),
    LAMB(lr=0.05, weight_decay=0.3, largest=0.7),
]
NAMES = [str(optimizer) for optimizer in SETTINGS]


def begin(optimizer: Optimizer, params: np.ndarray, layers: tuple[slice, ...] = LAYERS) -> OptimizerState:
    state = optimizer.init(params)
    state.tensors = layers
    return state


def walk(optimizer: Optimizer, rates: list[float], layers: tuple[slice, ...] = LAYERS) -> np.ndarray:
    """Return the parameters after steps with gradients that do not depend on the parameters."""
    random = np.random.default_rng(3)
    params = random.normal(size=40)
    state = begin(optimizer, params, layers)
    for rate in rates:
        optimizer.step(params, random.normal(size=40) + 0.5, state, rate)
    return params


def lars_in_numpy(it: LARS, rates: list[float]) -> np.ndarray:
    """Algorithm 1 of You, Gitman & Ginsburg, whose v absorbs the rate; corrected where that changes."""
    random = np.random.default_rng(3)
    w, v, before = random.normal(size=40), np.zeros(40), rates[0]
    for rate in rates:
        g = random.normal(size=40) + 0.5
        for layer in LAYERS:
            size, slope = np.linalg.norm(w[layer]), np.linalg.norm(g[layer])
            local = it.trust * size / (slope + it.weight_decay * size)
            push = rate * local * (g[layer] + it.weight_decay * w[layer])
            v[layer] = it.momentum * (rate / before) * v[layer] + push
        w, before = w - v, rate
    return w


def lamb_in_numpy(it: LAMB, rates: list[float]) -> np.ndarray:
    """Algorithm 2 of You et al. in plain numpy."""
    random = np.random.default_rng(3)
    w, m, v = random.normal(size=40), np.zeros(40), np.zeros(40)
    for t, rate in enumerate(rates, start=1):
        g = random.normal(size=40) + 0.5
        m, v = it.beta1 * m + (1 - it.beta1) * g, it.beta2 * v + (1 - it.beta2) * g**2
        r = m / (1 - it.beta1**t) / (np.sqrt(v / (1 - it.beta2**t)) + it.eps)
        for layer in LAYERS:
            u = r[layer] + it.weight_decay * w[layer]
            w[layer] -= rate * min(np.linalg.norm(w[layer]), it.largest) / np.linalg.norm(u) * u
    return w


RATES = [0.5, 0.5, 1.0, 1.5, 0.15, 0.15]


@pytest.mark.oracle("optimizer:lars")
@pytest.mark.parametrize("optimizer", SETTINGS[:3], ids=NAMES[:3])
def test_lars_is_algorithm_1(optimizer):
    np.testing.assert_allclose(walk(optimizer, RATES), lars_in_numpy(optimizer, RATES), rtol=1e-12, atol=1e-14)


@pytest.mark.oracle("optimizer:lamb")
@pytest.mark.parametrize("optimizer", SETTINGS[3:], ids=NAMES[3:])
def test_lamb_is_algorithm_2(optimizer):
    np.testing.assert_allclose(walk(optimizer, RATES), lamb_in_numpy(optimizer, RATES), rtol=1e-11, atol=1e-14)


@pytest.mark.negative_control("optimizer:lars", "optimizer:lamb")
@pytest.mark.parametrize("optimizer", SETTINGS, ids=NAMES)
def test_one_layer_where_there_are_three_is_noticed(optimizer):
    whole = walk(optimizer, RATES, (slice(0, 40),))
    oracle = lars_in_numpy if isinstance(optimizer, LARS) else lamb_in_numpy
    assert np.abs(whole - oracle(optimizer, RATES)).max() > 1e-5


def test_momentum_correction_makes_a_changing_rate_one_factor_outside_of_the_velocity():
    """With it v / lr is the velocity of heavy ball without the rate in it (Goyal et al. 2017, equations 9, 10)."""
    random = np.random.default_rng(5)
    gradients = random.normal(size=(6, 3))
    start = random.normal(size=3)

    def ends(optimizer):
        params, state = start.copy(), begin(optimizer, start, (slice(0, 3),))
        u, w = np.zeros(3), start.copy()
        for g, rate in zip(gradients, RATES, strict=True):
            u = 0.9 * u + 0.001 * np.linalg.norm(w) / np.linalg.norm(g) * g
            w = w - rate * u
            optimizer.step(params, g, state, rate)
        return params, w

    ours, outside = ends(LARS())
    np.testing.assert_allclose(ours, outside, rtol=1e-13)
    ours, outside = ends(LARS(momentum_correction=False))
    assert np.abs(ours - outside).max() > 1e-5


@pytest.mark.parametrize("optimizer", SETTINGS, ids=NAMES)
def test_layers_of_norm_zero_move_and_stay_finite(optimizer):
    params, gradient = np.zeros(40), np.ones(40)
    gradient[LAYERS[1]] = 0
    optimizer.step(params, gradient, begin(optimizer, params), optimizer.lr)
    assert np.isfinite(params).all()
    assert (params[LAYERS[0]] < 0).all()
    assert (params[LAYERS[1]] == 0).all()


@pytest.mark.parametrize("optimizer", SETTINGS, ids=NAMES)
def test_the_same_bits_wherever_the_array_lies(optimizer):
    """Replicas are rows of a matrix, and must stay equal."""
    random = np.random.default_rng(6)
    start, gradient = random.normal(size=(2, 41)).astype("float32")
    ends = []
    for shift in range(4):
        memory = np.zeros(48, "float32")
        params = memory[shift : shift + 40]
        params[:] = start[:40]
        optimizer.step(params, gradient[:40], begin(optimizer, params), optimizer.lr)
        ends.append(params.copy())
    assert equal_bits(*ends)


@pytest.mark.parametrize("text", ["lars(lr=20)", "lamb(lr=0.05)"])
def test_workers_that_step_themselves_can_use_them(text):
    """Replicas agree in every bit, and the run is that of one optimizer on the mean gradient."""
    job = small_job(text, "float64")
    run = run_strategy("all_reduce", 4, 20, job=job)
    assert equal_bits(*run.replicas)
    source = GradientSource(4, job)
    params = source.start()
    stepper = source.stepper(params)
    for _ in range(20):
        stepper.step(params, np.mean([source.gradient(rank, params) for rank in range(4)], 0))
    np.testing.assert_allclose(run.result, params, rtol=1e-10, atol=1e-12)
    assert NumpyEngine(job, 0).evaluate(run.result).loss < NumpyEngine(job, 0).evaluate(source.start()).loss
    for strategy in ("local_sgd(5)", "easgd", "gossip", "dpsgd"):
        assert np.isfinite(run_strategy(strategy, 4, 20, job=job).result).all()


@pytest.mark.parametrize("text", ["lars(lr=20)", "lamb(lr=0.05)"])
def test_a_stopped_run_goes_on(text):
    job = small_job(text)
    whole = run_strategy("all_reduce", 2, 20, job=job)
    half = run_strategy("all_reduce", 2, 10, job=job)
    resumed = run_strategy("all_reduce", 2, 20, job=job, resume=half.simulation.save())
    assert equal_bits(whole.result, resumed.result)


@pytest.mark.parametrize("strategy", ["ps(bsp)", "ps(asynchronous, shards=2)", "scatter_reduce", "hogwild", "downpour"])
@pytest.mark.parametrize("text", ["lars(lr=20.0)", "lamb(lr=0.05)"])
def test_whoever_steps_slices_refuses_them(strategy, text):
    name = text.partition("(")[0]
    with pytest.raises(CompositionError, match=rf"updates slices of the parameters, got {name}\(.*whole layers"):
        run_strategy(strategy, 2, 4, job=small_job(text))


def test_a_slice_of_unknown_layers_is_refused():
    for optimizer in (LARS(), LAMB()):
        params = np.ones(5)
        with pytest.raises(CompositionError, match="needs whole layers, got 5 parameters whose layers are not known"):
            optimizer.step(params, params, optimizer.init(params), 0.1)
        with pytest.raises(CompositionError, match="needs whole layers"):
            optimizer.step(params, params, begin(optimizer, params), 0.1)
        assert not optimizer.elementwise


class Forgetful(LARS):
    """Negative control: the ratio of norms is left out."""

    def _local_rate(self, weights, slopes):
        return self.trust


@pytest.mark.negative_control("optimizer:lars")
def test_lars_without_its_norms_is_noticed():
    assert np.abs(walk(Forgetful(lr=2.0), RATES) - lars_in_numpy(LARS(lr=2.0), RATES)).max() > 1e-4


@pytest.mark.parametrize("optimizer", SETTINGS, ids=NAMES)
def test_a_share_of_a_step_is_that_share_of_the_rate(optimizer):
    """Both divide by the norm of what they step along, which would undo a scaled gradient."""
    random = np.random.default_rng(4)
    start, gradient = random.normal(size=40), random.normal(size=40)
    moved = []
    for share in (1.0, 0.25):
        params = start.copy()
        optimizer.step(params, gradient, begin(optimizer, params), optimizer.lr, share)
        moved.append(params - start)
    np.testing.assert_allclose(moved[1], moved[0] / 4, rtol=1e-9, atol=1e-15)
