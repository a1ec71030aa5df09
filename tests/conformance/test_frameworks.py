"""One model, data and seed in numpy, PyTorch and JAX: every strategy leads to the same parameters up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from flockstep import registry
from flockstep.frameworks.job import make_engine
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import run_strategy
from support.frameworks import job, start
from support.matrix import few

jax = pytest.importorskip("jax")

BY_SIGNS = {"decoupled_momentum", "majority_vote", "two_way"}
"""Strategies that round or compare gradients, where a difference in the last bit may become a whole step."""


def synchronous() -> list[str]:
    names = registry.names("strategy")
    return [name for name in names if Strategy.parse(name).traits.delivery == "synchronous" and name not in BY_SIGNS]


OTHERS = [
    "local_sgd(period=4)",
    "streaming_diloco",
    "easgd",
    "gossip",
    "dpsgd",
    "asgd",
    "ps(ssp(2))",
    "downpour",
]
STRATEGIES = [*(name for name in synchronous() if name != "sufficient_factors"), *OTHERS]


@pytest.fixture(autouse=True)
def _doubles() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@cache
def trained(framework: str, strategy: str) -> np.ndarray:
    return run_strategy(strategy, 4, 12, job=job(framework), engine=make_engine).result


OPTAX: dict[str, Callable[[Any], Any]] = {
    "adam(lr=0.05)": lambda optax: optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(0.05)),
    "sgd(lr=0.2, momentum=0.9)": lambda optax: optax.inject_hyperparams(optax.sgd)(learning_rate=0.2, momentum=0.9),
}
"""Expression → the same optimizer of optax."""


@pytest.mark.parametrize(
    ("strategy", "text"),
    few(
        product(["all_reduce", "local_sgd(period=4)", "gossip", "easgd", "dpsgd"], OPTAX),
        ("local_sgd(period=4)", "adam(lr=0.05)"),
        ("easgd", "sgd(lr=0.2, momentum=0.9)"),
    ),
)
def test_an_optimizer_of_optax_is_the_expression_up_to_rounding(strategy: str, text: str) -> None:
    """Virtual time, with servers that have no optimizer (easgd)."""
    optax = pytest.importorskip("optax")
    jobs = replace(job("numpy"), optimizer=text), replace(job("jax"), optimizer=OPTAX[text](optax))
    expected, found = (run_strategy(strategy, 4, 12, job=each, engine=make_engine).result for each in jobs)
    assert np.abs(found - expected).max() <= 1e-7 * np.abs(expected).max()


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("strategy", few(STRATEGIES, "all_reduce"))
def test_equal_up_to_rounding(strategy: str, framework: str) -> None:
    if framework == "torch":
        pytest.importorskip("torch")
    expected, found = trained("numpy", strategy), trained(framework, strategy)
    assert np.abs(expected - np.concatenate([each.ravel() for each in start().values()])).max() > 0.1
    assert np.abs(found - expected).max() <= 1e-12 * np.abs(expected).max()
