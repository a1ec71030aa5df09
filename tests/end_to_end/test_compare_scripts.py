"""Comparisons of a user's own script: each run launches the script with another strategy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import flockstep
from flockstep.cli.app import run
from flockstep.errors import ConfigurationError
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.strategies.base import Strategy
from support.processes import RealRun
from support.scripts import NUMPY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SCRIPT = f"""{NUMPY}
import flockstep
from flockstep.runtime.node_spec import strategy_of_run

start(str(strategy_of_run("all_reduce")))
for number in range(int(sys.argv[1])):
    steps(2)
    optimizer.record_metric("accuracy", 0.3 * (number + 1), True, None)
    optimizer.record_metric("seed", flockstep.seed(), True, None)
optimizer.finish()
"""


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)


def test_a_script_is_compared_as_a_job_is_and_its_runs_are_taken_up_again(tmp_path: Path) -> None:
    words = ["compare", "script.py", "-n", "2", "-s", "gossip", "-s", "local_sgd(period=2)", "--seeds", "2"]
    words += ["--no-reference", "--seed", "3", "--target", "accuracy=0.5", "--json", "--", "2"]
    ended = RealRun(words, tmp_path / "c").end()
    assert ended.code == 0, ended.err
    found: dict[str, Any] = json.loads(ended.out)
    assert [(one["strategy"], one["seed"]) for one in found["runs"]] == [
        (strategy, seed) for strategy in ("gossip", "local_sgd(period=2)") for seed in (3, 4)
    ]
    for one in found["runs"]:
        assert one["metrics"] == {"accuracy": pytest.approx(0.6), "seed": one["seed"]}
        assert one["seconds_to_target"] > 0
        assert RunFolder(one["folder"]).read_config().strategy_given
    again = RealRun(words, tmp_path / "c").end()
    assert again.code == 0
    assert again.err.count("kept from before") == 4
    Path("script.py").write_text(SCRIPT + "\n")
    changed = RealRun(words, tmp_path / "c").end()
    assert (changed.code, changed.out) == (2, "")
    assert "script.py has changed since the run began" in changed.err


def test_a_strategy_of_the_command_replaces_that_of_the_script_and_says_so(tmp_path: Path) -> None:
    ended = RealRun(["launch", "-n", "2", "-s", "local_sgd(period=2)", "script.py", "1"], tmp_path / "run").end()
    assert ended.code == 0, ended.err
    told = "flockstep: --strategy local_sgd(period=2) replaces all_reduce, the strategy that the script names"
    assert ended.err.splitlines().count(told) == 1
    config = RunFolder(tmp_path / "run").read_config()
    assert Strategy.parse(config.strategy) == Strategy.parse("local_sgd(period=2)")
    assert "--strategy 'local_sgd(period=2)' --workers 2 --seed 0 " in config.command


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lr", "0.1"], "--lr 0.1 is for jobs, and a script without job() sets this itself; pass it to the script "),
        (["--network", "1gbit"], "--network 1gbit has an effect in virtual time only; add --simulate (in Python, "),
        (["-s", "hogwil"], "no strategy is called 'hogwil'; did you mean 'hogwild'?"),
        (["--target", "high"], "target must be a number, or a metric and a number, got 'high'; write it like 0.95 or "),
    ],
)
def test_what_a_script_cannot_take_is_refused_before_anything_starts(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compare", "script.py", "-n", "2", "-s", "all_reduce", *words, "--out", "c"]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("c").exists()


def test_settings_of_jobs_are_refused_in_python_too() -> None:
    with pytest.raises(ConfigurationError, match=r"--lr 0\.1 is for jobs, and a script without job"):
        flockstep.compare("script.py", ["all_reduce"], lr=0.1)
    with pytest.raises(ConfigurationError, match="arguments 2 is for scripts; leave it out"):
        flockstep.compare("quadratic", ["all_reduce"], arguments=["2"])
    assert not Path("runs").exists()


def test_a_target_of_another_metric_than_the_job_s_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", "quadratic", "-n", "1", "-s", "all_reduce", "--target", "f1=0.9", "--out", "r"]) == 2
    assert "got f1=0.9; write" in capsys.readouterr().err


def test_the_command_of_a_compared_script_repeats_its_run() -> None:
    config = RunConfig(
        kind="launch", job="s.py", strategy="gossip", strategy_given=True, workers=2, seed=3, target=0.5, metric="f1"
    )
    assert config.command == "flockstep launch --strategy gossip --workers 2 --seed 3 --target f1=0.5 s.py"
    assert RunConfig.from_toml(config.to_toml()) == config
