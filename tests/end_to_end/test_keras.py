"""Keras's `fit` on two workers, on the backends JAX and PyTorch; a loop of PyTorch and plain Keras are the oracles."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.matrix import few
from support.processes import RealRun

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc"),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")
        for name in ("keras", "torch")  # importing keras would load the backend of its settings
    ),
]

SCRIPT = Path(__file__).parents[1] / "support" / "keras_script.py"


def run(backend: str, folder: Path) -> list[dict[str, Any]]:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    folder.mkdir()
    shutil.copy(SCRIPT, folder / "script.py")
    ended = RealRun(["launch", "-n", "2", str(folder / "script.py"), backend], folder / "run", torch=True).end(550)
    assert ended.code == 0, ended.err
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module", params=few(["jax", "torch"], "jax", "torch"))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script has saved on each rank; one run of each backend serves all tests."""
    return run(request.param, tmp_path_factory.mktemp("keras") / request.param)


@pytest.mark.timeout(600)
def test_a_synchronous_strategy_ends_as_one_process_with_all_batches(results: Any) -> None:
    one, other = results
    assert np.array_equal(one["all_reduce"]["weights"], other["all_reduce"]["weights"])
    assert np.allclose(one["all_reduce"]["weights"], one["plain"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd(period=3)"])
def test_fit_ends_as_a_loop_of_pytorch(results: Any, strategy: str) -> None:
    one, other = results
    assert np.array_equal(one[strategy]["weights"], other[strategy]["weights"])
    assert np.allclose(one[strategy]["weights"], one["torch"][strategy], rtol=0, atol=1e-6)


def test_a_loop_without_fit_ends_as_one_process_with_all_batches(results: Any) -> None:
    for each in results:
        assert np.allclose(each["own loop"], each["plain"], rtol=0, atol=1e-6)


def test_strategies_that_are_not_synchronous_learn(results: Any) -> None:
    for part in ("local_sgd(period=3)", "servers"):
        one, other = (each[part] for each in results)
        assert np.array_equal(one["weights"], other["weights"])
        assert one["losses"][2] < 0.8 * one["losses"][0]


def test_validation_has_the_common_model(results: Any) -> None:
    one, other = (each["local_sgd(period=3)"] for each in results)
    assert len(one["validated"]) == 3
    assert all(map(np.array_equal, one["validated"], other["validated"]))


def test_a_second_fit_begins_with_one_optimizer_state(results: Any) -> None:
    """Replicas of all_reduce stay equal though local steps had brought the ranks' momenta apart."""
    assert np.array_equal(*(each["twice"] for each in results))


def test_the_statistics_of_batch_norm_are_the_mean(results: Any) -> None:
    assert np.array_equal(*(each["normalized"] for each in results))


def test_what_cannot_work_is_refused(results: Any) -> None:
    for each in results:
        found = each["refusals"]
        assert 'pass, for example, optimizer="adam(lr=0.001)"' in found["servers"]
        assert "a model with use_ema=True" in found["average"]
        # The refusal is that of JAX, whose train_step computes gradients and steps in one function.
        assert ("a model with a custom train_step" in found["step"]) == (each["backend"] == "jax"), found["step"]
