"""The optimizers against torch's own, and against their own slices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.arrays.schema import slices
from flockstep.errors import ConfigurationError
from flockstep.optimizers import Optimizer, OptimizerState
from flockstep.optimizers.adagrad import Adagrad
from flockstep.optimizers.adam import Adam, AdamW
from flockstep.optimizers.base import BLOCK, blocks
from flockstep.optimizers.sgd import SGD

SETTINGS = [
    SGD(lr=0.1),
    SGD(lr=0.1, weight_decay=0.03),
    SGD(lr=0.05, momentum=0.9),
    SGD(lr=0.05, momentum=0.9, dampening=0.4),
    SGD(lr=0.05, momentum=0.8, weight_decay=0.01),
    SGD(lr=0.05, momentum=0.8, dampening=0.2, weight_decay=0.01),
    SGD(lr=0.05, momentum=0.9, nesterov=True),
    SGD(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    Adam(lr=0.01),
    Adam(lr=0.01, beta1=0.0, beta2=0.5, eps=1e-3),
    Adam(lr=0.01, beta1=0.6, weight_decay=0.1),
    AdamW(lr=0.01),
    AdamW(lr=0.02, beta2=0.99, weight_decay=0.3),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, lr_decay=0.05, weight_decay=0.02, initial_accumulator_value=0.3, eps=1e-6),
]
NAMES = [str(optimizer) for optimizer in SETTINGS]


def torch_twin(optimizer: Optimizer, weights: object) -> object:
    """torch's optimizer with the same hyper-parameters."""
    torch = pytest.importorskip("torch")
    values = dict(vars(optimizer))
    if isinstance(optimizer, Adam):
        values["betas"] = values.pop("beta1"), values.pop("beta2")
    return getattr(torch.optim, type(optimizer).__name__)([weights], **values)


def trajectories(optimizer: Optimizer, dtype: str, steps: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Our parameters and torch's after the same gradients of a rough bowl."""
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(7)
    ours = random.normal(size=400).astype(dtype)
    theirs = torch.tensor(ours.copy(), requires_grad=True)
    twin, state = torch_twin(optimizer, theirs), optimizer.init(ours)
    for _ in range(steps):
        gradient = (random.normal(size=400) + random.normal()).astype(dtype)
        theirs.grad = torch.from_numpy(gradient.copy())
        twin.step()  # type: ignore[attr-defined]
        optimizer.step(ours, gradient, state, optimizer.lr)
    return ours, theirs.detach().numpy()


def run(optimizer: Optimizer, params: np.ndarray, gradients: np.ndarray) -> OptimizerState:
    state = optimizer.init(params)
    for gradient in gradients:
        optimizer.step(params, gradient, state, optimizer.lr)
    return state


@pytest.mark.parametrize("optimizer", SETTINGS, ids=NAMES)
def test_equals_torch(optimizer: Optimizer) -> None:
    ours, theirs = trajectories(optimizer, "float64")
    np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)
    ours, theirs = trajectories(optimizer, "float32")
    ulps = np.abs(ours.astype("float64") - theirs) / np.spacing(np.maximum(np.abs(theirs), 1))
    assert ulps.max() <= 20  # 50 steps, each rounded a few times


@pytest.mark.oracle("optimizer:sgd")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_plain_sgd_is_one_product_and_one_difference(dtype: str) -> None:
    random = np.random.default_rng(1)
    params, gradient = random.normal(size=(2, 3 * BLOCK + 5)).astype(dtype)
    expected = params - params.dtype.type(0.1) * gradient
    kept = gradient.copy()
    optimizer = SGD(lr=0.1)
    state = optimizer.init(params)
    optimizer.step(params, gradient, state, 0.1)
    assert np.array_equal(params, expected)
    assert np.array_equal(gradient, kept)
    assert state.slots == {}
    assert state.steps == 1


def changing(optimizer: Optimizer) -> np.ndarray:
    """Ours, after gradients that do not depend on the parameters, at a rate that changes."""
    random = np.random.default_rng(11)
    params = random.normal(size=30)
    state = optimizer.init(params)
    for step in range(1, 13):
        optimizer.step(params, random.normal(size=30), state, 0.1 / step)
    return params


def in_numpy(optimizer: Optimizer) -> np.ndarray:
    """The same by the formulas of the docstrings, without a message of ours."""
    random = np.random.default_rng(11)
    w, a, b = random.normal(size=30), np.zeros(30), np.zeros(30)
    for t in range(1, 13):
        g, lr = random.normal(size=30), 0.1 / t
        decay = optimizer.weight_decay  # type: ignore[attr-defined]
        if type(optimizer) is AdamW:
            w = w - lr * decay * w
        else:
            g = g + decay * w
        if isinstance(optimizer, SGD):
            a = g if t == 1 else optimizer.momentum * a + g
            w = w - lr * (g + optimizer.momentum * a if optimizer.nesterov else a)
        elif isinstance(optimizer, Adam):
            a = optimizer.beta1 * a + (1 - optimizer.beta1) * g
            b = optimizer.beta2 * b + (1 - optimizer.beta2) * g**2
            mean, square = a / (1 - optimizer.beta1**t), b / (1 - optimizer.beta2**t)
            w = w - lr * mean / (np.sqrt(square) + optimizer.eps)
        elif isinstance(optimizer, Adagrad):
            a = a + g**2
            w = w - lr / (1 + (t - 1) * optimizer.lr_decay) * g / (np.sqrt(a) + optimizer.eps)
    return w


def distance(ours: Optimizer, other: Optimizer) -> float:
    return float(np.abs(changing(ours) - in_numpy(other)).max())


@pytest.mark.oracle("optimizer:sgd", "optimizer:adam", "optimizer:adamw", "optimizer:adagrad")
@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(momentum=0.9, weight_decay=0.02),
        SGD(momentum=0.9, weight_decay=0.02, nesterov=True),
        Adam(beta2=0.99, weight_decay=0.1),
        AdamW(beta2=0.99, weight_decay=0.1),
        Adagrad(lr_decay=0.05, weight_decay=0.1),
    ],
    ids=str,
)
def test_a_step_by_its_formula(optimizer: Optimizer) -> None:
    """The rate stays out of the velocity of sgd, so that it may change without a correction."""
    assert distance(optimizer, optimizer) < 1e-13


@pytest.mark.negative_control("optimizer:sgd", "optimizer:adam", "optimizer:adamw", "optimizer:adagrad")
@pytest.mark.parametrize(
    ("optimizer", "other", "least"),
    [
        (SGD(momentum=0.9, nesterov=True), SGD(momentum=0.9), 1e-2),
        (SGD(momentum=0.9, weight_decay=0.02), SGD(momentum=0.9), 1e-3),
        (Adam(weight_decay=0.1), AdamW(weight_decay=0.1), 1e-3),
        (Adam(beta2=0.5), Adam(beta2=0.999), 1e-2),
        (AdamW(weight_decay=0.1), Adam(weight_decay=0.1), 1e-3),
        (Adagrad(lr_decay=0.05), Adagrad(), 1e-3),
    ],
)
def test_another_formula_is_noticed(optimizer: Optimizer, other: Optimizer, least: float) -> None:
    assert distance(optimizer, other) > least


@pytest.mark.parametrize("optimizer", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("parts", [2, 7])
def test_a_slice_on_its_own_equals_the_slice_of_the_whole(optimizer: Optimizer, parts: int) -> None:
    random = np.random.default_rng(3)
    size = 2 * BLOCK + 77
    start = random.normal(size=size).astype("float32")
    gradients = random.normal(size=(4, size)).astype("float32")
    whole = start.copy()
    state = run(optimizer, whole, gradients)
    for part in slices(size, parts):
        own = start[part].copy()
        own_state = run(optimizer, own, gradients[:, part])
        assert own.tobytes() == whole[part].tobytes()
        for name, slot in own_state.slots.items():
            assert slot.tobytes() == state.slots[name][part].tobytes()


@pytest.mark.parametrize("optimizer", SETTINGS, ids=NAMES)
def test_a_state_continues_bit_for_bit(optimizer: Optimizer) -> None:
    random = np.random.default_rng(4)
    start, gradients = random.normal(size=50).astype("float32"), random.normal(size=(6, 50)).astype("float32")
    whole, resumed = start.copy(), start.copy()
    run(optimizer, whole, gradients)
    state = run(optimizer, resumed, gradients[:3])
    state = OptimizerState(state.steps, {name: slot.copy() for name, slot in state.slots.items()})
    for gradient in gradients[3:]:
        optimizer.step(resumed, gradient, state, optimizer.lr)
    assert whole.tobytes() == resumed.tobytes()


def test_slots_have_explicit_names_and_the_length_of_the_parameters() -> None:
    params = np.zeros(5, "float32")
    names = {
        SGD(): set(),
        SGD(momentum=0.5): {"momentum"},
        Adam(): {"mean", "square"},
        AdamW(): {"mean", "square"},
        Adagrad(initial_accumulator_value=0.5): {"square_sum"},
    }
    for optimizer, expected in names.items():
        state = optimizer.init(params)
        assert set(state.slots) == expected
        assert all(slot.shape == (5,) and slot.dtype == params.dtype for slot in state.slots.values())
    assert Adagrad(initial_accumulator_value=0.5).init(params).slots["square_sum"].tolist() == [0.5] * 5


def test_an_eps_that_vanishes_in_the_dtype_is_refused() -> None:
    half = np.zeros(3, "float16")
    with pytest.raises(
        ConfigurationError,
        match="eps must not round to zero in float16, got 1e-10; use at least 6e-05",
    ):
        Adagrad().init(half)
    with pytest.raises(ConfigurationError, match="eps must not round to zero"):
        Adam().init(half)
    Adam(eps=1e-4).init(half)


@given(st.integers(0, 5 * BLOCK))
def test_blocks_cover_everything_once(size: int) -> None:
    covered = [i for part in blocks(size) for i in (part.start, part.stop)]
    assert covered[::2] == [0, *covered[1:-1:2]][: len(covered) // 2]
    assert not covered or (covered[0], covered[-1]) == (0, size)
    assert all(0 < part.stop - part.start <= BLOCK for part in blocks(size))


LINEAR = [setting for setting in SETTINGS if isinstance(setting, SGD)]


@pytest.mark.parametrize("share", [0.25, 1 / 3, 2.0])
@pytest.mark.parametrize("optimizer", LINEAR, ids=str)
def test_a_share_of_a_gradient_has_that_share_of_its_effect_over_all_later_steps(optimizer: SGD, share: float) -> None:
    """Whatever the shares of the steps before and after: - share lr (1 - dampening) g / (1 - momentum) in the end."""
    optimizer = replace(optimizer, weight_decay=0.0)
    params, gradient = np.zeros(3), np.array([1.0, -2.0, 0.5])
    state = optimizer.init(params)
    optimizer.step(params, 0 * gradient, state, optimizer.lr)
    optimizer.step(params, gradient, state, optimizer.lr, share)
    for _ in range(400):
        optimizer.step(params, 0 * gradient, state, optimizer.lr, 0.25)
    total = optimizer.lr * (1 - optimizer.dampening) / (1 - optimizer.momentum)
    np.testing.assert_allclose(params, -share * total * gradient, rtol=1e-12)


@pytest.mark.parametrize("optimizer", [s for s in SETTINGS if not getattr(s, "lr_decay", 0)], ids=str)
def test_the_parts_of_many_steps_together_are_as_long_as_the_steps(optimizer: Optimizer) -> None:
    """Four parts for each step, of the same gradient; weight decay too acts once a step."""
    rate, steps, parts = optimizer.lr / 10, 400, 4
    moved = []
    for share in (1.0, 1 / parts):
        params = np.linspace(-1, 1, 5)
        state, gradient, start = optimizer.init(params), np.array([1.0, -2.0, 0.5, 0.1, 3.0]), params.copy()
        for _ in range(round(steps / share)):
            optimizer.step(params, gradient, state, rate, share)
        moved.append(params - start)
    np.testing.assert_allclose(moved[0], moved[1], rtol=0.05)


@pytest.mark.parametrize("optimizer", [Adam(lr=0.01), AdamW(lr=0.01, weight_decay=0.3)], ids=str)
def test_adam_does_not_undo_a_share(optimizer: Optimizer) -> None:
    """If the gradient were scaled instead, Adam would take the full step."""
    steps = []
    for share in (1.0, 0.25):
        params = np.linspace(-1, 1, 5)
        state = optimizer.init(params)
        optimizer.step(params, np.array([1.0, -2.0, 0.5, 0.1, 3.0]), state, optimizer.lr, share)
        steps.append(params - np.linspace(-1, 1, 5))
    np.testing.assert_allclose(steps[1], steps[0] / 4, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("optimizer", SETTINGS, ids=NAMES)
def test_blocks_and_slices_take_the_same_share(optimizer: Optimizer) -> None:
    random = np.random.default_rng(2)
    whole = random.normal(size=2 * BLOCK + 7)
    gradient, half = random.normal(size=len(whole)), len(whole) // 2
    pieces = [whole[:half].copy(), whole[half:].copy()]
    state, states = optimizer.init(whole), [optimizer.init(piece) for piece in pieces]
    for _ in range(3):
        optimizer.step(whole, gradient, state, optimizer.lr, 0.3)
        for piece, part, own in zip(pieces, (gradient[:half], gradient[half:]), states, strict=True):
            optimizer.step(piece, part, own, optimizer.lr, 0.3)
    assert whole.tobytes() == np.concatenate(pieces).tobytes()


def test_the_step_uses_the_learning_rate_it_is_given() -> None:
    params, gradient = np.ones(4, "float32"), np.ones(4, "float32")
    optimizer = SGD(lr=0.5)
    optimizer.step(params, gradient, optimizer.init(params), 0.25)
    assert params.tolist() == [0.75] * 4
