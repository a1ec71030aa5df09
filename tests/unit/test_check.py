"""Prediction beside measurement: records of simulated and real runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.costs.cluster_reading import load_cluster
from flockstep.errors import ConfigurationError
from flockstep.launchers.simulate import simulate
from flockstep.planning.check import check, measure
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder


def record(folder: Path, strategy: str, network: str = "link(bandwidth='10mbit', latency=0.001)", **more: str) -> Path:
    config = RunConfig(
        kind="simulate",
        job="softmax",
        strategy=strategy,
        workers=4,
        steps=200,
        network=network,
        compute=more.get("compute", "constant(0.01)"),
    )
    simulate(config, folder)
    return folder


@pytest.mark.parametrize(
    "strategy", ["all_reduce", "ps", "ps(consistency=asynchronous)", "local_sgd(period=8)", "scatter_reduce", "dpsgd"]
)
def test_simulated_runs_are_predicted(strategy: str, tmp_path: Path) -> None:
    found = check(record(tmp_path / "run", strategy))
    assert found.source == "form"
    assert abs(found.error) < 0.05
    assert found.sent_error is not None
    assert abs(found.sent_error) < 0.15
    assert found.predicted.utilisation == pytest.approx(found.measured.utilisation, abs=0.05)


@pytest.mark.parametrize("strategy", ["tree_server", "slice_servers"])
def test_what_has_no_form_is_predicted_by_a_rehearsal(strategy: str, tmp_path: Path) -> None:
    found = check(record(tmp_path / "run", strategy))
    assert found.source == "rehearsal"
    assert abs(found.error) < 0.05


def test_random_times(tmp_path: Path) -> None:
    found = check(record(tmp_path / "run", "all_reduce", compute="exponential(0.01)"))
    assert abs(found.error) < 0.15


def test_a_prediction_for_other_links_is_noticed_to_be_wrong(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "all_reduce", "link(bandwidth='1mbit')")
    assert abs(check(folder).error) < 0.05
    assert check(folder, load_cluster("lab-1gbit")).error < -0.5


def test_two_tiers_are_rehearsed(tmp_path: Path) -> None:
    found = check(record(tmp_path / "run", "all_reduce", "two_tier(2, '1gbit', 0.0001, '10mbit', 0.001)"))
    assert found.source == "rehearsal"
    assert abs(found.error) < 0.05


def test_real_runs_need_a_cluster_and_records_need_steps(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "all_reduce")
    with pytest.raises(ConfigurationError, match="three steps"):
        measure(RunFolder(folder).read_events()[:0], 4)
    with pytest.raises(ConfigurationError):
        check(tmp_path / "nothing")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "run", "all_reduce")
    assert run(["plan", "softmax", "--check", str(folder), "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert abs(said["error"]) < 0.05
    assert run(["plan", "softmax", "--check", str(folder)]) == 0
    assert "predicted and measured" in capsys.readouterr().out
    assert run(["plan", "digits", "--check", str(folder)]) == 2
    assert "must be of digits" in capsys.readouterr().err
