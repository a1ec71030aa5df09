"""Lightning's `Trainer` and `Fabric` on two workers; plain Lightning in one process with all batches is the oracle."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support.matrix import few  # noqa: E402
from support.processes import RealRun  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SCRIPT = Path(__file__).parents[1] / "support" / "lightning_script.py"


@pytest.fixture(scope="module", params=few(["pytorch_lightning", "lightning"], "pytorch_lightning"))
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the script has saved on each rank; importing Lightning takes long, so one run serves all tests."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp("lightning")
    shutil.copy(SCRIPT, folder / "script.py")
    ended = RealRun(["launch", "-n", "2", str(folder / "script.py"), request.param], folder / "run", torch=True).end(
        550
    )
    assert ended.code == 0, ended.err
    return [torch.load(folder / f"results-{rank}") for rank in range(2)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", ["synchronous", "adversaries", "fabric"])
def test_a_synchronous_strategy_ends_as_one_process_with_all_batches(results: Any, part: str) -> None:
    """With accumulation and clipping; `adversaries`: two optimizers in manual optimization."""
    one, other = (each[part] for each in results)
    assert torch.equal(one["ours"], other["ours"])
    torch.testing.assert_close(one["ours"], one["theirs"], rtol=0.0, atol=1e-6)


def test_what_is_logged_is_that_of_all_ranks(results: Any) -> None:
    for each in results:
        ours, theirs = each["synchronous"]["logged"]
        assert ours == pytest.approx(theirs, rel=1e-5)
        assert each["synchronous"]["steps"] == 12
        assert (each["fabric"]["total"], each["fabric"]["gathered"]) == (3.0, [0.0, 1.0])


@pytest.mark.parametrize("part", ["local", "servers"])
def test_a_strategy_that_is_not_synchronous_learns(results: Any, part: str) -> None:
    one, other = (each[part] for each in results)
    assert torch.equal(one["result"], other["result"])
    for each in (one, other):
        assert each["losses"][2] < 0.4 * each["losses"][0]
        assert each["losses"][3] < 0.7 * each["losses"][2], "the fit from the checkpoint has not gone on from it"


def test_validation_and_checkpoints_have_the_common_model(results: Any) -> None:
    one, other = (each["local"] for each in results)
    assert one["losses"][0] != other["losses"][0], "the replicas are equal, so this test shows nothing"
    for here, there in zip(one["validated"], other["validated"], strict=True):
        assert torch.equal(here, there)
    assert torch.equal(one["saved"], one["validated"][-1])


def test_what_cannot_work_is_refused(results: Any) -> None:
    for each in results:
        found = each["refusals"]
        assert "devices=3 means 3 processes" in found["devices"]
        assert "sync_batchnorm=True needs sums" in found["batch norm"]
        assert "clip by norm instead" in found["values"]
        assert "got set; broadcast tensors" in found["objects"]
        assert "without background tasks" in found["background"]
