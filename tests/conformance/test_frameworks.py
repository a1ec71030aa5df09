"""One model, data and seed in numpy, PyTorch and JAX: every strategy leads to the same parameters up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest

from flockstep import registry
from flockstep.errors import CompositionError
from flockstep.frameworks.base import Engine
from flockstep.frameworks.job import make_engine
from flockstep.messages import Message
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import Sent, SimulatedRun, run_strategy
from support.frameworks import job, start
from support.matrix import few

with suppress(ModuleNotFoundError):  # not within a test: importing JAX sets variables of the environment
    import jax

ARGUMENTS = {
    "local_sgd": "local_sgd(period=4)",
    "streaming_diloco": "streaming_diloco(period=4, overlap=2)",
    "noloco": "noloco(period=4)",
    "codistillation": "codistillation(period=2)",
}
"""Strategies whose default periods are too long for a run of 12 steps, with shorter ones."""
FACTORS = ("sufficient_factors", "factor_server")
"""Strategies that send factors, which are smaller than a gradient of this network if a batch is one sample."""
FRAMEWORKS = ("numpy", "torch", "jax")
EXCLUDED = {
    ("codistillation", "numpy"): "Perceptron has no classes and cannot learn from the predictions of other models",
    **{(strategy, "jax"): "this model has no layer that can be factored" for strategy in FACTORS},
}
"""Strategies and frameworks that cannot be compared, with the reason, which is the message of the refusal."""


def pairs(name: str) -> list[tuple[str, str]]:
    """A strategy's first framework with each of the strategy's other frameworks."""
    first, *others = [framework for framework in FRAMEWORKS if (name, framework) not in EXCLUDED]
    return [(first, other) for other in others]


CASES = [
    (ARGUMENTS.get(name, name), pair)
    for name in [*registry.names("strategy"), "asgd", "ps(ssp(2))"]
    for pair in pairs(name)
]


@pytest.fixture
def doubles() -> Iterator[None]:
    """JAX computes in float64; a test is skipped without JAX."""
    pytest.importorskip("jax")
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture
def frameworks(request: pytest.FixtureRequest) -> Sequence[str]:
    """Frameworks that are installed."""
    names: Sequence[str] = request.param
    for name in names:
        pytest.importorskip(name)
    if "jax" in names:
        request.getfixturevalue("doubles")
    return names


@cache
def engine(framework: str, batch: int) -> Engine:
    return make_engine(job(framework, batch), 0)


@cache
def run(framework: str, strategy: str) -> SimulatedRun:
    batch = 1 if strategy in FACTORS else 8
    return run_strategy(strategy, job=job(framework, batch), steps=12, engine=lambda *_: engine(framework, batch))


OPTAX: dict[str, Callable[[Any], Any]] = {
    "adam(lr=0.05)": lambda optax: optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(0.05)),
    "sgd(lr=0.2, momentum=0.9)": lambda optax: optax.inject_hyperparams(optax.sgd)(learning_rate=0.2, momentum=0.9),
}
"""Expression → the same optimizer of optax."""


@pytest.mark.usefixtures("doubles")
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


@pytest.mark.parametrize(
    ("strategy", "frameworks"),
    few(CASES, *product(["all_reduce", "hogwild"], [("numpy", "torch"), ("numpy", "jax")])),
    indirect=["frameworks"],
    ids=lambda each: each if isinstance(each, str) else "-".join(each),
)
def test_equal_up_to_rounding(strategy: str, frameworks: Sequence[str]) -> None:
    expected, found = (run(each, strategy) for each in frameworks)
    assert np.abs(expected.result - np.concatenate([each.ravel() for each in start().values()])).max() > 0.05
    assert np.abs(found.result - expected.result).max() <= 1e-12 * np.abs(expected.result).max()
    sent, theirs = ([(each.tag, np.size(each.array)) for each in messages(run)] for run in (expected, found))
    assert sent == theirs
    assert bool(sent) == (strategy != "ensemble"), "without messages, every strategy would lead to equal parameters"


def messages(run: SimulatedRun) -> list[Message]:
    return [entry.message for entry in run.simulation.log if isinstance(entry, Sent)]


def test_every_strategy_is_compared_or_excluded() -> None:
    compared = {
        (registry.name_of(type(Strategy.parse(strategy))), name)
        for strategy, frameworks in CASES
        for name in frameworks
    }
    assert sorted([*compared, *EXCLUDED]) == sorted(product(registry.names("strategy"), FRAMEWORKS))


@pytest.mark.parametrize(
    ("strategy", "frameworks", "reason"),
    [(strategy, [framework], reason) for (strategy, framework), reason in EXCLUDED.items()],
    indirect=["frameworks"],
)
def test_what_is_excluded_is_refused(strategy: str, frameworks: Sequence[str], reason: str) -> None:
    with pytest.raises(CompositionError, match=reason):
        run(frameworks[0], ARGUMENTS.get(strategy, strategy))
