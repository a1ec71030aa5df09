"""Comparisons: several learning rates, several seeds, an end at the target, runs that diverge."""

from __future__ import annotations

import html
import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flockstep.cli.app import run
from flockstep.experiments.comparison import Grid, runs_in
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.report.medians import RepeatedRuns, caveats
from flockstep.runtime.node_metrics import fingerprint

BASE = ["compare", "quadratic", "--simulate", "-n", "4", "--steps", "60", "--no-reference", "--out", "c"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def compared(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> dict[str, Any]:
    assert run([*BASE, *options, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def badness(one: dict[str, Any]) -> tuple[float, float]:
    """Seconds to the target, then how far the metric (lower is better) is from it; a useless run is worst."""
    if one["status"] == "diverged":
        return math.inf, math.inf
    time, metric = one["seconds_to_target"], one["final_metric"]
    return math.inf if time is None else time, math.inf if metric is None else metric


def test_each_strategy_is_ranked_at_its_best_rate_of_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, "-s", "all_reduce", "-s", "broadcast", "--lr-grid", "0.002,0.3,1.2")
    assert [(r["strategy"], r["lr"]) for r in found["runs"]] == [
        (strategy, lr) for strategy in ("all_reduce", "broadcast") for lr in (0.002, 0.3, 1.2)
    ]
    for strategy in ("all_reduce", "broadcast"):
        runs = [one for one in found["runs"] if one["strategy"] == strategy]
        want = min(runs, key=badness)["lr"]
        assert [one["lr"] for one in found["medians"] if one["strategy"] == strategy and one["chosen"]] == [want]
    diverged = [one for one in found["runs"] if one["status"] == "diverged"]
    assert [(one["strategy"], one["lr"]) for one in diverged] == [("broadcast", 1.2)]
    assert run([*BASE, "-s", "all_reduce", "-s", "broadcast", "--lr-grid", "0.002,0.3,1.2"]) == 0
    out, err = capsys.readouterr()
    assert err.count("kept from before") == 6  # a run that diverged is not repeated
    assert "0.3*" in out
    assert "Every learning rate; * marks the learning rate that is ranked" in Path("c/report.html").read_text()


def test_seeds_are_ranked_by_their_medians(capsys: pytest.CaptureFixture[str]) -> None:
    found = compared(capsys, "-s", "asgd", "-s", "bsp", "--seeds", "3", "--seed", "5", "--target", "1e-9")
    for one in found["medians"]:
        finals = [r["final_metric"] for r in found["runs"] if r["strategy"] == one["strategy"]]
        assert (one["seeds"], one["reached"], len(set(finals))) == ([5, 6, 7], 0, 3)
        assert one["final_metric"] == {
            "least": min(finals),
            "median": statistics.median(finals),
            "largest": max(finals),
        }


def test_the_report_goes_by_medians(capsys: pytest.CaptureFixture[str]) -> None:
    """Each strategy is one row and is compared with the others, not with its own other seeds; the median of four seeds
    is the figure of none of them."""
    found = compared(
        capsys, "-s", "asgd", "-s", "bsp", "--seeds", "4", "--target", "0.3", "--compute", "exponential(1)"
    )
    written = {"ps(consistency=asynchronous)": "asgd", "ps(consistency=bsp)": "bsp"}
    medians = {written[one["strategy"]]: one["seconds_to_target"]["median"] for one in found["medians"]}
    page = " ".join(html.unescape(re.sub("<[^>]*>", "", Path("c/report.html").read_text().split("<script")[0])).split())
    first, second = sorted(medians, key=medians.__getitem__)
    sentence = re.search(r"What the figures show (\S+) reached .* first, after ([0-9.]+) virtual s", page)
    assert sentence, page[:2000]
    assert sentence[1] == first
    assert float(sentence[2]) == pytest.approx(medians[first], rel=0.01)
    times = [one["seconds_to_target"] for one in found["runs"]]
    assert not any(time == pytest.approx(medians[first], rel=0.03) for time in times)
    assert f"{second} followed after" in page
    assert "seed 1" not in page
    assert "Figures are medians over 4 seeds" in page
    assert "All runs used one seed" not in page


def test_what_a_grid_does_not_settle_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    grid = [*BASE, "-s", "all_reduce", "--lr-grid"]
    assert run([*grid, "0.002,0.01", "--out", "low"]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "were chosen on these same runs" in err
    assert "all_reduce: the best learning rate 0.01 is the largest of the grid; extend the grid" in err
    assert "is the largest of the grid; extend the grid." in Path("low/report.html").read_text()
    assert run([*grid, "0.002,0.3,20", "--out", "middle"]) == 0
    err = capsys.readouterr().err
    assert "were chosen on" in err
    assert "extend it" not in err


def test_medians_over_different_seeds_are_said_not_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    compared(capsys, "-s", "asgd", "-s", "bsp", "--seeds", "2")
    runs = [RunFolder(one).read_summary() for one in runs_in(Path("c"))]
    made = [RepeatedRuns(tuple(r for r in runs if r.strategy == s)) for s in dict.fromkeys(r.strategy for r in runs)]
    differ = "medians are over different numbers of seeds, from "
    assert not any(said.startswith(differ) for said in caveats(made, made))
    said = caveats([made[0], RepeatedRuns(made[1].runs[:1])], made)[-1]
    assert said.startswith(f"{differ}1 to 2 runs each")


def test_every_comparison_holds_one_worker_which_uses_as_many_samples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # for all columns
    words = ["compare", "softmax", "--simulate", "-n", "4", "--steps", "40", "--target", "0.7", "--out", "c"]
    words += ["-s", "all_reduce", "-s", "local_sgd(period=4)"]
    assert run([*words, "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(one["strategy"], one["workers"]) for one in runs] == [
        ("all_reduce", 4), ("local_sgd(period=4)", 4), ("all_reduce", 1),
    ]  # fmt: skip
    samples = [max(e.samples for e in RunFolder(one["folder"]).read_events() if hasattr(e, "samples")) for one in runs]
    assert samples[0] == samples[1] == samples[2] > 0
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert err.count("kept from before") == 3
    assert "3 of 3: softmax, one worker" in err
    (row,) = [line.split() for line in out.splitlines() if line.split()[1:2] == ["local_sgd(period=4)"]]
    single, together = runs[2]["seconds_to_target"], runs[1]["seconds_to_target"]
    assert [float(cell) for cell in row[2:5]] == pytest.approx([together, single / together, 4 * together], rel=0.01)
    shown = Path("c/report.html").read_text().split("What the figures show", 1)[1].split("<p>", 2)[1]
    assert shown.startswith("No strategy is known to be faster than one worker: ")
    assert run([*words, "--no-reference", "--out", "d"]) == 0
    assert "one worker" not in capsys.readouterr().out


def test_one_worker_is_undisturbed_and_uses_the_samples_of_the_replicas() -> None:
    base = RunConfig(
        kind="simulate", job="digits", strategy="", workers=8, steps=30, evaluate_every=3, partition="pipeline(4)",
        faults=("nan_gradient(worker=1, step=3)",), split="dirichlet(0.1)", network="1gbit", compute="constant(0.01)",
    )  # fmt: skip
    alone = Grid(base, ["all_reduce"]).alone
    assert alone is not None
    assert (alone.workers, alone.partition, alone.steps, alone.evaluate_every) == (1, None, 60, 6)
    assert (alone.faults, alone.split, alone.compute) == ((), "iid", base.compute)
    assert Grid(replace(base, workers=1, partition=None), ["all_reduce"]).alone is None
    assert Grid(base, ["all_reduce"], reference=False).alone is None


def test_a_comparison_may_end_at_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["-s", "asgd", "-s", "bsp", "--target", "0.3"]
    whole = compared(capsys, *options)["runs"]
    assert run([*BASE[:-1], "d", *options, "--until-target", "--json"]) == 0
    short = json.loads(capsys.readouterr().out)["runs"]
    for one, other in zip(whole, short, strict=True):
        assert one["seconds_to_target"] == other["seconds_to_target"] is not None
        assert other["seconds"] < one["seconds"]
        assert other["status"] == "finished"
        steps = [worker["steps"] for worker in other["per_worker"]]
        assert 0 < max(steps) < 60
        assert fingerprint(RunFolder(other["folder"]).read_result()[0]) == other["result_hash"]
    assert "--until-target" in RunFolder(short[0]["folder"]).read_config().command


def test_the_resulting_model_may_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    ends = {
        result: compared(capsys, "-s", "easgd", "--result", result, "--out", result)["runs"][0]["result_hash"]
        for result in ("server", "mean", "best")
    }
    assert len(set(ends.values())) == 3


def test_a_run_that_ended_without_a_usable_model_is_not_finished(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.py").write_text(
        "import numpy as np\nimport dataclasses\nfrom flockstep.workloads.base import Workload\n"
        "def job():\n"
        "    job = Workload.parse('quadratic').job(0)\n"
        "    return dataclasses.replace(job, metric=lambda outputs, targets: float('nan'), optimizer='sgd(lr=1e-3)')\n"
    )
    assert run(["simulate", "job.py", "-s", "bsp", "-n", "2", "--steps", "3", "--out", "r", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["status"] == "diverged"
    assert "flockstep: bsp diverged: the loss or metric of the last evaluation is not finite" in err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--lr-grid", "0.1,x"], "--lr-grid must be a number, got 'x'"),
        (["--result", "server"], "result must be one of"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*BASE, "-s", "gossip", *options]) == 2
    assert sentence in capsys.readouterr().err
    assert not Path("c").exists()


def test_gradients_that_cannot_be_batched_are_said_to_be_computed_one_by_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("gru.py").write_text(
        "import torch\nfrom torch import nn\nfrom flockstep import Data, Job\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.gru = nn.GRU(2, 3, batch_first=True)\n"
        "    def forward(self, x):\n        return self.gru(x)[0][:, -1]\n"
        "def data():\n    x = torch.randn(40, 4, 2, generator=torch.Generator().manual_seed(0))\n"
        "    return Data(x, (x.sum((1, 2)) > 0).long(), x, (x.sum((1, 2)) > 0).long())\n"
        "def job():\n    return Job(Net, data, 'sgd(lr=0.1)', loss=nn.functional.cross_entropy, batch=4)\n"
    )
    assert run(["compare", "gru.py", "--simulate", "-s", "bsp", "-n", "2", "--steps", "2", "--out", "c"]) == 0
    assert "flockstep: gradients were computed one by one: " in capsys.readouterr().err
    assert "Gradients were computed one by one: " in Path("c/report.html").read_text()


def test_every_workers_own_model_is_evaluated_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    one = compared(capsys, "-s", "ensemble", "-s", "bsp")["runs"]
    alone, together = ([worker["metric"] for worker in run["per_worker"]] for run in one)
    assert len(set(alone)) == 4
    assert None not in alone
    assert len(set(together)) == 1
    assert together[0] == pytest.approx(one[1]["final_metric"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "2"], "--nodes 2 is for hosts that you start yourself"),
        (["--node-rank", "1"], "but a comparison has several runs; use --hosts a:4,b:4, --on slurm or --on ray"),
        (
            ["--simulate", "--on", "ray"],
            "--on ray is for real processes only; leave out either",
        ),
        (["--simulate", "--hosts", "a:2"], "--hosts a:2 is for real processes only"),
        (["--slurm-options", "--hold"], "--slurm-options --hold is for a Slurm job; add --on slurm"),
    ],
)
def test_hosts_that_a_comparison_cannot_have(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compare", "quadratic", "-s", "bsp", "-n", "2", *options, "--out", "c"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("c").exists()
