"""A gradient that stands for a share of a step counts as that share, under every optimizer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from flockstep.frameworks.torch_groups import ELEMENTWISE, TorchOptimizer
from flockstep.optimizers import Optimizer
from flockstep.optimizers.adagrad import Adagrad
from flockstep.optimizers.adam import Adam, AdamW
from flockstep.optimizers.lamb import LAMB
from flockstep.optimizers.lars import LARS
from flockstep.optimizers.sgd import SGD
from flockstep.runtime.state import from_bytes, to_bytes


def shared_out(optimizer: Optimizer, cycles: int = 400) -> float:
    """How far an element moves whose gradient is 1 in 3/4 of each step and -1 in 1/4, relative to 1 throughout."""
    params = np.full(100, 10.0)
    state, gradient = optimizer.init(params), np.ones(100)
    state.tensors = (slice(0, 100),)
    for _ in range(cycles):
        for share, sign in ((0.75, 1.0), (0.25, -1.0)):
            gradient[0] = sign
            optimizer.step(params, gradient, state, optimizer.lr, share)
    return float((params[0] - 10) / (params[1] - 10))


@pytest.mark.parametrize(
    "optimizer",
    [
        *(SGD(lr=1e-4), SGD(lr=1e-4, momentum=0.9), SGD(lr=1e-4, momentum=0.9, nesterov=True), Adagrad(lr=1e-4)),
        *(Adam(lr=1e-4), Adam(lr=1e-4, beta1=0.0), AdamW(lr=1e-4, weight_decay=0.0)),
        *(LAMB(lr=1e-4, weight_decay=0.0), LARS(lr=0.1)),
    ],
    ids=str,
)
def test_a_gradient_counts_as_its_share_whatever_the_share_of_those_around_it(optimizer: Optimizer) -> None:
    """3/4 - 1/4: 0 to 0.1 where the running mean takes a gradient as if it stood for a full step."""
    assert shared_out(optimizer) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("kind", "momentum"),
    [
        *[(kind, None) for kind in ("Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD")],
        *[("SGD", 0.0), ("SGD", 0.9), ("RMSprop", 0.0), ("RMSprop", 0.9)],
    ],
)
def test_torchs_own_classes_count_a_gradient_as_its_share(kind: str, momentum: float | None) -> None:
    pytest.importorskip("torch")
    group = {"weight_decay": 0.0} if momentum is None else {"momentum": momentum}
    optimizer = TorchOptimizer(kind, json.dumps([group]), lr=1e-4)
    assert shared_out(optimizer) == pytest.approx(0.5, abs=0.03)


def test_torchs_own_classes_go_on_from_a_saved_state() -> None:
    pytest.importorskip("torch")
    random = np.random.default_rng(3)
    for kind in ELEMENTWISE:
        optimizer = TorchOptimizer(kind, '[{}, {"lr": 2.0}]', "[[0, 4, 0], [4, 9, 1]]", lr=0.01)
        params = random.normal(size=9)
        state = optimizer.init(params)
        for _ in range(3):
            optimizer.step(params, random.normal(size=9), state, optimizer.lr)
        restored, other, gradient = from_bytes(to_bytes(state)), params.copy(), random.normal(size=9)
        optimizer.step(params, gradient, state, optimizer.lr)
        optimizer.step(other, gradient, restored, optimizer.lr)
        assert other.tobytes() == params.tobytes(), kind


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad"])
def test_torchs_own_classes_take_shares_as_ours_do(kind: str) -> None:
    pytest.importorskip("torch")
    ours = {"Adam": Adam, "AdamW": AdamW, "Adagrad": Adagrad}[kind](lr=0.01)
    theirs, random = TorchOptimizer(kind, lr=0.01), np.random.default_rng(3)
    ends = np.ones((2, 10))
    states = ours.init(ends[0]), theirs.init(ends[1])
    for share in (0.75, 0.25, 1.0, 1 / 3, 2.0, 0.25):
        gradient = random.normal(size=10)
        ours.step(ends[0], gradient, states[0], 0.01, share)
        theirs.step(ends[1], gradient, states[1], 0.01, share)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-6)
