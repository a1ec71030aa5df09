"""Prediction beside measurement: records of simulated and real runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.costs.cluster_file import load_cluster, read_cluster
from flockstep.errors import ConfigurationError
from flockstep.launchers.simulate import simulate
from flockstep.launchers.train import train
from flockstep.planning.check import check, for_report, measure
from flockstep.planning.fit import fit_records
from flockstep.planning.job_profile import Site, task_of
from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.report.html import render

TITLE = "Predicted and measured</h2>"


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
    "strategy",
    [
        "all_reduce",
        "ps",
        "ps(consistency=asynchronous)",
        "local_sgd(period=8)",
        "scatter_reduce",
        "dpsgd",
        "tree_server",
    ],
)
def test_simulated_runs_are_predicted(strategy: str, tmp_path: Path) -> None:
    found = check(record(tmp_path / "run", strategy))
    assert found.source == "rehearsal"
    assert abs(found.error) < 0.05
    assert found.sent_error is not None
    assert abs(found.sent_error) < 0.15
    assert found.predicted.utilization == pytest.approx(found.measured.utilization, abs=0.05)


def test_random_times(tmp_path: Path) -> None:
    found = check(record(tmp_path / "run", "all_reduce", compute="exponential(0.01)"))
    assert abs(found.error) < 0.15


def test_a_prediction_for_other_links_is_noticed_to_be_wrong(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "all_reduce", "link(bandwidth='1mbit')")
    assert abs(check(folder).error) < 0.05
    assert check(folder, load_cluster("lab-1gbit")).error < -0.5


@pytest.mark.parametrize(
    "strategy", ["all_reduce", "ps(consistency=asynchronous)", "ps(consistency=backup(1))", "easgd"]
)
def test_samples_a_second_are_those_of_the_whole_run(strategy: str, tmp_path: Path) -> None:
    folder = record(tmp_path / "run", strategy, compute="lognormal(0.01, sigma=0.5)")
    found = check(folder)
    snapshots, steps = (
        [one for one in RunFolder(folder).read_events() if isinstance(one, kind)]
        for kind in (EvaluationEvent, StepEvent)
    )
    end = max(one.seconds for one in steps)
    assert found.measured.rate == pytest.approx(max(one.samples for one in snapshots) / end)
    assert found.rate_error == pytest.approx(0.0, abs=0.05)
    assert found.predicted.rate == pytest.approx((1 + found.rate_error) * found.measured.rate)


def test_a_simulated_run_of_another_network_than_the_clusters_is_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = load_cluster("lab-1gbit")
    site = Site(task_of("softmax"), shape)
    note = "the run was simulated with link(bandwidth='10mbit', latency=0.001) and constant(mean=0.01)"
    folder = record(tmp_path / "run", "all_reduce")
    assert check(folder).notes == ()
    found, gradients = check(folder, shape).notes
    assert found == f"{note}: the error includes the difference from lab-1gbit"
    assert gradients.startswith("a gradient of all_reduce took 10.00 ms in the run and takes 200 µs on lab-1gbit: ")
    (told,) = for_report([folder], shape)
    assert told is not None
    assert note in told.source
    assert run(["plan", "softmax", "--check", str(folder), "--cluster", "lab-1gbit"]) == 0
    assert "the run was simulated with link(bandwidth='10mbit'" in capsys.readouterr().out
    alike = record(tmp_path / "alike", "all_reduce", str(shape.network(4)), compute=str(site.compute(4)))
    assert check(alike, shape).notes == ()


MACHINES = """
compute = "constant(0.01)"
[nodes.a]
count = {count}
workers = {workers}
[[links]]
node = "a"
bandwidth = "8000gbit"
[[links]]
inside = "a"
bandwidth = "10mbit"
latency = "1ms"
"""


def test_a_run_over_hosts_is_predicted_on_their_machines_and_other_machines_are_noted(tmp_path: Path) -> None:
    """Sums go by host: a ring of the workers would send half as much more."""
    run = record(tmp_path / "run", "all_reduce", "tiers((2, 2), (0, 0), (link(1e12),), (link('10mbit', '1ms'),))")
    found = check(run, read_cluster(MACHINES.format(count=2, workers=2)))
    assert abs(found.error) < 0.05
    assert not any("workers on its hosts" in note for note in found.notes)
    apart = check(run, read_cluster(MACHINES.format(count=4, workers=1)))
    assert abs(apart.error) > 0.1
    assert "the run had [2, 2] workers on its hosts, but cluster has [1, 1, 1, 1] on its machines" in " ".join(
        apart.notes
    )


def test_gradients_that_take_as_long_as_in_the_run_explain_an_error(tmp_path: Path) -> None:
    """The cluster has the links of the run, but gradients of 10 ms in place of 2 ms."""
    links = "tiers((2, 2), (0, 0), (link(1e12),), (link('10mbit', '1ms'),))"
    cluster = read_cluster(MACHINES.format(count=2, workers=2))
    found = check(record(tmp_path / "run", "gossip", links, compute="constant(0.002)"), cluster)
    assert found.error > 1
    assert abs(found.error_besides_gradients) < 0.05
    (note,) = [note for note in found.notes if "a gradient" in note]
    assert "a gradient of gossip took 2.00 ms in the run and takes 10.0 ms on cluster" in note
    assert note.endswith("a step is predicted to take 2.00 ms, an error of 0 %")
    other = check(record(tmp_path / "slow", "gossip", "link('1mbit')", compute="constant(0.01)"), cluster)
    assert other.gradient_seconds is None
    assert other.error_besides_gradients == other.error


def test_two_tiers_are_rehearsed(tmp_path: Path) -> None:
    found = check(record(tmp_path / "run", "all_reduce", "two_tier(2, '1gbit', 0.0001, '10mbit', 0.001)"))
    assert found.source == "rehearsal"
    assert abs(found.error) < 0.05


def test_runs_of_split_models_are_not_compared_with_whole_replicas(tmp_path: Path) -> None:
    simulate(
        RunConfig(
            kind="simulate", job="digits(batch=8)", strategy="all_reduce", workers=4, steps=20,
            network="link('1gbit')", compute="constant(0.01)", partition="pipeline(2, 1f1b, 4)",
        ),
        tmp_path,
    )  # fmt: skip
    for cluster in (None, load_cluster("lab-1gbit")):
        with pytest.raises(
            ConfigurationError, match=r"a run of a split model, pipeline\(.*; predict split replicas with"
        ):
            check(tmp_path, cluster)
        assert for_report([tmp_path], cluster) == [None]


def test_real_runs_need_a_cluster_and_records_need_steps(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "all_reduce")
    with pytest.raises(ConfigurationError, match="three steps"):
        measure(RunFolder(folder).read_events()[:0], 4)
    with pytest.raises(ConfigurationError, match="nothing"):
        check(tmp_path / "nothing")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "run", "all_reduce")
    assert run(["plan", "softmax", "--check", str(folder), "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert abs(said["error"]) < 0.05
    assert run(["plan", "softmax", "--check", str(folder)]) == 0
    assert "predicted and measured" in capsys.readouterr().out
    assert run(["plan", "digits", "--check", str(folder)]) == 2
    assert "must hold a run of digits" in capsys.readouterr().err


JOB = """
import numpy as np
from flockstep.frameworks.numpy import SoftmaxRegression
from flockstep import Data, Job

def job():
    x = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    return Job(model=lambda: SoftmaxRegression(5, 2), data=lambda: Data(x, y, x, y), optimizer="sgd(lr=0.1)", batch=5)
"""


def test_job_files_are_compared_by_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    config = RunConfig(
        kind="simulate", job="mine.py", strategy="all_reduce", workers=3, steps=12, network="1gbit",
        compute="constant(0.01)",
    )  # fmt: skip
    simulate(config, tmp_path / "run")
    (tmp_path / "copies").mkdir()
    (tmp_path / "copies" / "mine.py").write_text(JOB)
    (tmp_path / "copies" / "other.py").write_text(JOB)
    for same in ("mine.py", "./mine.py", str(tmp_path / "mine.py"), "copies/mine.py", "copies/other.py"):
        assert run(["plan", same, "--check", "run"]) == 0, (same, capsys.readouterr().err)
    (tmp_path / "mine.py").write_text(JOB.replace("60", "70"))
    assert run(["plan", "mine.py", "--check", "run"]) == 2
    assert "run must hold a run of mine.py, got a run of mine.py of other content" in capsys.readouterr().err
    assert run(["plan", "copies/mine.py", "--check", "run"]) == 0


def test_a_workload_may_be_written_in_another_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "run", "all_reduce")
    assert run(["plan", "softmax()", "--check", str(folder)]) == 0, capsys.readouterr().err


def test_a_run_of_real_processes_is_checked_with_the_cluster_fitted_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "run", tmp_path / "cluster.toml"
    config = RunConfig(
        kind="train", job="softmax", strategy="all_reduce", workers=2, transport="tcp", steps=40, threads=1
    )
    train(config, folder)
    with pytest.raises(ConfigurationError, match="name a cluster"):
        check(folder)
    calibration = fit_records([folder])
    file.write_text(calibration.to_toml())
    assert load_cluster(str(file)).wires[0].fair  # links of real processes are shared
    assert run(["plan", "softmax", "--check", str(folder), "--cluster", str(file), "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)
    assert said["source"] == "rehearsal"
    assert said["sent_error"] == pytest.approx(0.0, abs=0.01)
    steps = [event for event in RunFolder(folder).read_events() if isinstance(event, StepEvent)]
    took = [step.compute_seconds + step.wait_seconds + step.comm_seconds for step in steps]
    assert min(took) <= said["measured"]["seconds"] <= max(took)
    assert said["error"] == pytest.approx(said["predicted"]["seconds"] / said["measured"]["seconds"] - 1)
    assert run(["report", str(folder), "--cluster", str(file), "--out", str(tmp_path / "with.html")]) == 0
    assert run(["report", str(folder), "--out", str(tmp_path / "without.html")]) == 0
    assert TITLE in (tmp_path / "with.html").read_text("utf-8")
    assert TITLE not in (tmp_path / "without.html").read_text("utf-8")


def test_every_report_of_simulated_runs_shows_prediction_and_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "compared"
    simulated = ["--workers", "4", "--steps", "40", "--network", "1gbit", "--compute", "constant(0.01)"]
    strategies = ["--strategy", "all_reduce", "--strategy", "slice_servers", "--strategy", "ps"]
    assert run(["compare", "softmax", *strategies, "--simulate", *simulated, "--out", str(out)]) == 0, (
        capsys.readouterr()
    )
    page = (out / "report.html").read_text("utf-8")
    (section,) = re.findall(TITLE + "(.*?)</section>", page, re.DOTALL)
    assert section.count("rehearsal, link(") == 4  # one worker alone is the fourth
    errors = [float(one) for one in re.findall(r">([-+][0-9.]+)%<", section)]
    assert len(errors) == 4
    assert max(map(abs, errors)) < 5


def test_a_prediction_that_is_wrong_says_so_in_the_report(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "all_reduce", "link(bandwidth='1mbit')")
    (right,), (wrong,) = for_report([folder]), for_report([folder], load_cluster("lab-1gbit"))
    assert right is not None
    assert wrong is not None
    assert abs(right.error) < 0.05
    assert wrong.error < -0.5
    assert f"{wrong.error:+.1%}" in render([RunFolder(folder).read()], predictions=[wrong])


def test_runs_that_cannot_be_predicted_are_left_out_of_the_report(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", "all_reduce")
    RunFolder(folder).events_file.write_text("")
    assert for_report([folder]) == [None]
    assert TITLE not in render([RunFolder(record(tmp_path / "other", "slice_servers")).read()], predictions=[None])
