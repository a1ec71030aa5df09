"""Transformers' `Trainer` and Accelerate on two workers; the same script with Accelerate's DDP is the oracle."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from support.processes import RealRun  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SCRIPT = Path(__file__).parents[1] / "support" / "transformers_script.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits_accelerate.py"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script has saved on each rank; importing Transformers takes long, so one run serves all tests."""
    folder = tmp_path_factory.mktemp("transformers")
    shutil.copy(SCRIPT, folder / "script.py")
    ended = RealRun(["launch", "-n", "2", str(folder / "script.py")], folder / "run", torch=True).end(550)
    assert ended.code == 0, ended.err
    return [torch.load(folder / f"results-{rank}") for rank in range(2)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["synchronous", "accelerate"])
def test_a_synchronous_strategy_ends_as_under_ddp(results: Any, part: str) -> None:
    """With accumulation and clipping; under Accelerate also with a state that is saved and loaded."""
    one, other = (each[part] for each in results)
    assert torch.equal(one["ours"], other["ours"])
    torch.testing.assert_close(one["ours"], one["theirs"], rtol=0.0, atol=2e-6)


def test_what_is_logged_is_what_is_logged_under_ddp(results: Any) -> None:
    for each in results:
        ours, theirs = (each["synchronous"][f"{name} logged"] for name in ("ours", "theirs"))
        assert len(ours[0]) == 4
        assert len(ours[1]) == 2
        for found, expected in zip(ours, theirs, strict=True):
            assert found == pytest.approx(expected, rel=1e-3)
        assert (each["accelerate"]["total"], each["accelerate"]["gathered"]) == (3.0, [0.0, 1.0])


@pytest.mark.parametrize("part", ["local", "servers"])
def test_a_strategy_that_is_not_synchronous_learns(results: Any, part: str) -> None:
    one, other = (each[part] for each in results)
    assert torch.equal(one["result"], other["result"])
    for each in (one, other):
        assert each["again"][:2] == each["evaluated"], "the second training has not gone on from the checkpoint"
        assert each["again"][3] < 0.7 * 2.77  # that of a uniform guess of 16 tokens


def test_evaluations_and_checkpoints_have_the_common_model(results: Any) -> None:
    one, other = (each["local"] for each in results)
    assert one["evaluated"] == other["evaluated"]
    assert torch.equal(one["saved"], one["result"])


def test_clipping_values_of_a_combined_gradient_is_refused(results: Any) -> None:
    for each in results:
        assert "clip by norm instead" in each["refusal"]


@pytest.mark.full
def test_the_example_of_accelerate_learns(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    ended = RealRun(["launch", "-n", "2", str(EXAMPLE)], tmp_path / "run", torch=True).end(400)
    assert ended.code == 0, ended.err
    assert float(ended.out.split("test accuracy ")[1].split()[0]) > 0.8
