"""A plan before a run: its figures against rehearsals, its tables and its refusals."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flockstep
from flockstep.cli.app import run
from flockstep.cli.planning import print_plan
from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_file import load_cluster
from flockstep.errors import ConfigurationError, RunError
from flockstep.experiments.options import PlanOptions
from flockstep.experiments.planned import PlanResult, planned
from flockstep.planning import step_prediction
from flockstep.planning.advice import advise
from flockstep.planning.check import Check, Figures
from flockstep.planning.criteria import departures, relative_samples
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.plan import MOST, Outlook, candidates, plan
from flockstep.planning.search import Found
from flockstep.planning.step_prediction import (
    ALONE,
    Unpredictable,
    alone,
    exposure,
    predict_step,
    rehearsed,
)
from flockstep.planning.tables import CRITERIA, PREDICTIONS, criteria, prediction_cells, predictions
from flockstep.planning.trials import Trial
from flockstep.planning.words import as_much, exposed, many, short
from flockstep.records.folder import RunFolder
from flockstep.simulation.law import mean_of
from flockstep.strategies.base import Strategy
from support.clusters import equal_machines as cluster

FEW = ("all_reduce", "ps", "ps(consistency=asynchronous)", "local_sgd(period=8)", "all_reduce(codec=half)")
TASK = JobProfile("surrogate", 100_000, ((400, 200), (20_000,)))


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    return plan(TASK, cluster("100mbit"), strategies=FEW)


def test_steps_of_known_shapes_are_what_their_links_say() -> None:
    """A ring of 4 takes 2 (n - 1) rounds of a quarter; the card of a server's machine passes
    n - 1 models in and n - 1 out, as the worker beside the server sends nothing over it.
    """
    site, busy = Site(TASK, cluster("100mbit")), 4 * TASK.elements / 12.5e6
    ring, server = (predict_step(Strategy.parse(text), site, 4) for text in ("all_reduce", "ps"))
    assert ring.seconds == pytest.approx(0.01 + 6 * (5e-5 + busy / 4), rel=0.02)
    assert server.seconds == pytest.approx(0.01 + 2 * 5e-5 + 4 * busy, rel=0.02)
    assert (ring.sent_bytes, server.sent_bytes) == pytest.approx((1.5 * TASK.nbytes, TASK.nbytes), rel=1e-3)


def test_ranked_by_what_samples_are_worth(outlook: Outlook) -> None:
    speedups = [one.samples_per_second / outlook.relative_samples(one) for one in outlook.predictions]
    assert speedups == sorted(speedups, reverse=True)
    assert {one.name for one in outlook.predictions} >= {ALONE, "all_reduce", "local_sgd(period=8)"}
    assert outlook.alone.seconds == pytest.approx(0.01, rel=0.02)


def test_barriers_are_exposed_to_stragglers_and_asynchrony_is_not() -> None:
    site = Site(TASK, cluster("10gbit"))
    strategies = {text: Strategy.parse(text) for text in FEW}
    shares = {text: exposure(one, site, 4) for text, one in strategies.items()}
    assert shares["all_reduce"] > 0.8
    assert shares["ps(consistency=asynchronous)"] < 0.2


def test_a_strategy_has_the_name_under_which_it_was_written() -> None:
    site = Site(TASK, cluster("1gbit"))
    names = [name for name, _ in candidates((), site)]
    assert {"asgd", "bsp", "gossip"} <= set(names)
    assert "ps(consistency=asynchronous)" not in names
    written = ("asgd", "ps(bsp)", "gosgd", "ps(asynchronous)")
    assert [name for name, _ in candidates(written, site)] == ["asgd", "ps(consistency=bsp)", "gosgd"]
    found = plan(TASK, cluster("1gbit"), strategies=("asgd",))
    assert [one.name for one in found.predictions if one.strategy is not None] == ["asgd"]
    assert found.named("ps(consistency=asynchronous)") is found.named("asgd")


def test_messages_that_nobody_waits_for_make_updates_late_and_not_steps_long() -> None:
    site = Site(TASK, cluster("1mbit"))
    found = predict_step(Strategy.parse("broadcast"), site, 4)
    assert found.seconds == pytest.approx(0.01, rel=0.1)
    assert found.sent_bytes / 125_000 > 100 * found.seconds
    assert relative_samples(found, site) > 1000


def test_steps_of_a_wide_range_cannot_be_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    site, strategy = Site(TASK, cluster("1gbit")), Strategy.parse("all_reduce")
    known = rehearsed(strategy, site, 4)
    assert predict_step(strategy, site, 4).seconds == pytest.approx(known.seconds_per_step)
    wild = dataclasses.replace(known, range=0.6)
    monkeypatch.setattr(step_prediction, "rehearsed", lambda *given, **more: wild)
    for workers in (4, 32):
        with pytest.raises(Unpredictable, match=r"cannot be predicted: after \d+ steps of a rehearsal"):
            predict_step(strategy, site, workers)
    found = plan(TASK, cluster("1gbit"), strategies=("all_reduce",))
    assert [name for name, why in found.refused if "cannot be predicted" in why] == ["all_reduce"]


def test_a_sample_is_worth_less_the_staler_it_is() -> None:
    site = Site(TASK, cluster("10gbit", count=64))
    few, many, plain = (
        relative_samples(predict_step(Strategy.parse(text), site, n), site)
        for text, n in (("ps(consistency=asynchronous)", 4), ("ps(consistency=asynchronous)", 64), ("all_reduce", 4))
    )
    assert many > few > plain > 1
    assert relative_samples(alone(site), site) == 1


HEAVY = "slow_spells(pareto(0.02, shape=1.8), probability=0.02, factor=6, length=8)"


def drawn_law(random: np.random.Generator) -> str:
    """A compute model of gradients of 20 ms: light or heavy tails, perhaps slow spells, perhaps uneven speeds."""
    laws = (
        "constant(0.02)",
        "exponential(0.02)",
        f"lognormal(0.02, sigma={random.uniform(0.2, 2):.2f})",
        f"pareto(0.02, shape={random.uniform(1.3, 3):.2f})",
        f"normal(0.02, cv={random.uniform(0.1, 1):.2f})",
        "empirical((0.01, 0.012, 0.02, 0.2))",
    )
    law = laws[random.integers(len(laws))]
    if random.random() < 0.5:
        law = f"slow_spells({law}, {random.uniform(0.005, 0.05):.3f}, {random.uniform(2, 10):.1f}, 8)"
    return f"speeds({law}, (1, 1.5, 4))" if random.random() < 0.3 else law


def assert_no_rate_above(site: Site, strategies: Iterable[Strategy]) -> None:
    """Check that n workers are not predicted to process more than n times the samples of one worker."""
    workers = site.cluster.workers
    most = workers * alone(site).samples_per_second
    for strategy in strategies:
        try:
            rate = predict_step(strategy, site, workers).samples_per_second
        except ConfigurationError:  # the strategy cannot run there, or is refused as unpredictable
            continue
        assert rate <= most, (str(strategy), str(site.cluster.law), rate / most)


@pytest.mark.parametrize("law", [HEAVY, "lognormal(0.02, sigma=1.8)", "speeds(constant(0.02), (1, 4))"])
def test_n_workers_process_at_most_n_times_the_samples_of_one(law: str) -> None:
    texts = ("asgd", "easgd", "ensemble", "ps(backup(1))", "gradient_coding", "local_sgd", "all_reduce")
    assert_no_rate_above(Site(TASK, cluster("1gbit", law, count=12)), map(Strategy.parse, texts))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_no_drawn_law_gives_n_workers_more_than_n_times_the_samples_of_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, bandwidth = int(random.choice([2, 4, 8, 12, 20])), f"{10 ** random.uniform(1, 4):.0f}mbit"
    site = Site(TASK, cluster(bandwidth, drawn_law(random), count))
    assert_no_rate_above(site, (strategy for _, strategy in candidates((), site)))


def test_rates_of_heavy_tails_are_those_of_the_mean() -> None:
    """Who waits for nobody processes n times the samples of one worker, however few gradients are rehearsed."""
    site = Site(TASK, cluster("10gbit", HEAVY, count=12))
    found = predict_step(Strategy.parse("ensemble"), site, 12)
    assert found.samples_per_second == pytest.approx(12 * alone(site).samples_per_second, rel=0.01)
    assert found.range < 0.01


def row_of(found: Outlook, name: str) -> dict[str, str]:
    cells = prediction_cells(advise(found), found.named(name))
    return dict(zip((one.heading for one in PREDICTIONS), cells, strict=True))


def test_a_range_stands_beside_the_step() -> None:
    uneven = plan(TASK, cluster("1gbit", HEAVY, count=12), strategies=("dpsgd",))
    assert re.fullmatch(r"[\d.]+ ms ± \d+ %", row_of(uneven, "dpsgd")["step"])
    steady = plan(TASK, cluster("1gbit"), strategies=("dpsgd",))
    assert "±" not in row_of(steady, "dpsgd")["step"]


def test_work_sets_the_time_of_a_gradient_where_it_is_known() -> None:
    shape = dataclasses.replace(cluster(), operations=1e9)
    site = Site(dataclasses.replace(TASK, work=2e9), shape)
    assert mean_of(site.compute(4)) == pytest.approx(2.0)
    assert Site(TASK, shape).seconds is None
    assert any("whatever the job" in said for said in Site(TASK, shape).assumptions())


def test_reference_models_and_jobs_have_sizes() -> None:
    assert task_of("vgg-a").elements == pytest.approx(133e6, rel=0.01)
    softmax = task_of("softmax", batch=7)
    assert softmax.batch == 7
    assert sum(map(math.prod, softmax.tensors)) == softmax.elements
    with pytest.raises(ConfigurationError, match="sotfmax"):
        task_of("sotfmax")
    with pytest.raises(ConfigurationError, match="batch"):
        task_of("softmax", batch=0)


def test_more_workers_than_the_cluster_has_are_said_to_be_more_of_the_same() -> None:
    def said(shape: ClusterShape, workers: int | None) -> str:
        found = plan(TASK, shape, workers, strategies=("all_reduce",))
        return "; ".join(found.left_out)

    assert "test has 4 workers: 9 are assumed to run on 9 machines of the same kind instead of 4" in said(cluster(), 9)
    assert "laptop has 4 workers: 5 are assumed to share its machines" in said(load_cluster("laptop"), 5)
    assert "a plan takes at most 64 of the 100 workers of test" in said(cluster(count=100), None)
    for workers in (None, 4, 2):
        assert "are taken" not in said(cluster(), workers)


@pytest.mark.parametrize(("count", "workers"), [(4, MOST + 1), (10**6, 10**6)])
def test_a_plan_for_too_many_workers_is_refused_at_once(count: int, workers: int) -> None:
    with pytest.raises(ConfigurationError, match=f"at most 64 workers, got {workers:,}; give at most 64"):
        plan(TASK, cluster(count=count), workers)


def test_hogwild_needs_one_machine() -> None:
    found = plan(TASK, cluster(), strategies=("hogwild",))
    assert [name for name, _ in found.refused] == ["hogwild"]


def test_a_custom_strategy_that_ends_in_a_deadlock_does_not_end_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(strategy: Strategy, *arguments: Any) -> Any:
        if str(strategy).startswith("gossip"):
            raise RunError("deadlock: every program waits")
        return predict_step(strategy, *arguments)

    monkeypatch.setattr("flockstep.planning.plan.predict_step", predict)
    found = plan(TASK, cluster(), strategies=("gossip", "all_reduce"))
    assert found.refused == (("gossip", "deadlock: every program waits"),)
    assert [one.name for one in found.predictions if one.strategy is not None] == ["all_reduce"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "softmax", "--budget", "0", "--cluster", "lab-1gbit", "-n", "4", "--out", str(page)]
    strategies = [word for text in ("all_reduce", "local_sgd") for word in ("-s", text)]
    assert run([*words, *strategies, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {one["name"] for one in said["strategies"]} == {"all_reduce", "local_sgd", ALONE}
    assert said["advice"]["choice"] in {"all_reduce", "local_sgd", ALONE}
    text = page.read_text()
    assert "Criteria" in text
    assert "<script src" not in text
    assert run([*words[:8], *strategies]) == 0
    assert "softmax on 4 workers of lab-1gbit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["softmax", "--cluster", "lab"], "lab"),
        (["softmax", "--require", "speed"], "requirement"),
        (["softmax", "--out", "plan.txt"], ".html"),
        (["softmax", "-n", "0"], "workers"),
        (["softmax", "-s", "all_reduse"], "all_reduse"),
    ],
)
def test_wrong_words_are_refused(words: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    assert rule in capsys.readouterr().err


def test_strategies_that_were_named_and_cannot_run_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "softmax", "--budget", "0", "-c", "lab-1gbit", "-s", "hogwild"]) == 2
    assert "hogwild: the strategy needs all workers on one machine" in capsys.readouterr().err
    assert run(["plan", "softmax", "--budget", "0", "-c", "lab-1gbit", "-n", "2", "-s", "hogwild", "-s", "ps"]) == 0


def test_the_cluster_that_is_taken_without_one_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--help"]) == 0
    assert "default: laptop" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_an_interrupted_plan_says_which_strategies_were_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(strategy: Strategy, site: Site, workers: int) -> Any:
        if str(strategy) == "gossip":
            raise KeyboardInterrupt
        return predict_step(strategy, site, workers)

    monkeypatch.setattr(importlib.import_module("flockstep.planning.plan"), "predict_step", stopped)
    assert run(["plan", "vgg-a", "-n", "2", "-s", "all_reduce", "-s", "bsp", "-s", "gossip"]) == 130
    said = "flockstep: interrupted; 2 of 3 strategies were finished: all_reduce, bsp; a plan of fewer strategies"
    assert said in capsys.readouterr().err


def test_tables_and_json_say_what_is_worth_most(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "softmax", "--budget", "0", "-c", "lab-1gbit", "-n", "4", "-s", "all_reduce", "-s", "gossip"]
    assert run([*words, "--json", "--require", "reproducible"]) == 0
    said = json.loads(capsys.readouterr().out)
    speedups = [one["speedup"] for one in said["strategies"]]
    assert speedups == sorted(speedups, reverse=True)
    assert next(one["speedup"] for one in said["strategies"] if one["name"] == ALONE) == 1
    assert run([*words, "--require", "reproducible"]) == 0
    text = capsys.readouterr().out
    assert "ruled out:" in text
    assert "gossip: the order of updates differs from run to run" in text
    assert "speed-up" in text


def test_a_plan_that_names_no_cluster_is_for_this_machine_once_it_was_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["plan", "softmax", "--budget", "0", "-n", "1", "-s", "all_reduce"]
    assert run(words) == 0
    said = capsys.readouterr()
    assert "softmax on 1 worker of laptop" in said.out
    assert "calibrated" not in said.err
    with pytest.raises(ConfigurationError, match="flockstep calibrate"):
        load_cluster("here")
    kept = tmp_path / ".cache" / "flockstep" / "here.toml"
    kept.parent.mkdir(parents=True)
    kept.write_text(
        'compute = "constant(0.01)"\n[nodes.here]\nworkers = 2\n[[links]]\nnode = "here"\nbandwidth = "1gbit"\n'
    )
    assert run(words) == 0
    said = capsys.readouterr()
    assert "softmax on 1 worker of here" in said.out
    assert flockstep.plan("softmax", workers=1, strategies=["all_reduce"]).outlook.site.cluster.name == "here"
    assert f"calibrated in {kept}" in " ".join(said.err.split())
    ran = ["simulate", "softmax", "-s", "all_reduce", "-n", "2", "--steps", "2", "--cluster", "here"]
    assert run([*ran, "--out", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("softmax on 2 workers, VIRTUAL seconds: on the cluster here\n")
    record = RunFolder(tmp_path / "run")
    assert (record.read_config().cluster, record.read_summary().cluster) == ("here", "here")
    assert run([*words, "--cluster", "laptop"]) == 0
    assert "of laptop" in capsys.readouterr().out


def test_words_of_a_plan(outlook: Outlook) -> None:
    assert short("auto(latency=3e-05, bandwidth=4000000000.0)") == "auto(latency=3e-5, bandwidth=4e9)"
    assert short("local_sgd(period=1000)") == "local_sgd(period=1000)"
    assert short("x(share=0.75)") == "x(share=0.75)"
    text = "all_reduce(collective=auto(latency=3e-05, bandwidth=2500000.0))"
    assert Strategy.parse(short(text)) == Strategy.parse(text)
    assert many(1, "worker") == "1 worker"
    assert many(1024, "worker") == "1,024 workers"
    assert many(2, "process", "processes") == "2 processes"
    assert as_much(0.01) == "1 % as many"
    assert as_much(1.001) == "as many"
    assert as_much(3.21) == "3.2 times as many"
    assert exposed(1.35) == "over 100 %"
    assert exposed(0.16) == "16 %"


def test_errors_that_round_to_nothing_have_no_sign() -> None:
    figures = Figures(1.0, 100.0, 1.0, None)
    slow = dataclasses.replace(figures, seconds=1.0001)
    row = Check("softmax", "ps", 2, "lab", figures, slow).cells()
    assert row[4] == row[10] == "0 %"
    far = Check("softmax", "ps", 2, "lab", figures, dataclasses.replace(figures, seconds=0.8)).cells()
    assert far[4] == "+25.0 %"


def test_lateness_is_the_same_in_the_table_and_in_the_text() -> None:
    found = plan(TASK, cluster("10gbit"), strategies=("gossip", "all_reduce", "ensemble"))
    row = row_of(found, "gossip")
    assert any(f"{row['staleness']} versions late" in said for said in departures(found.named("gossip"), found.site))
    graded = criteria(advise(found))
    place = [one.heading for one in CRITERIA].index("staleness")
    assert next(cells for cells in graded.rows if cells[0] == "gossip")[place] == row["staleness"]
    assert row_of(found, "ensemble")["staleness"] == "–"


def test_a_plan_begins_with_its_advice_and_shows_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(PlanOptions("vgg-a", "lab-1gbit", workers=2))
    print_plan(found, everything=False)
    short = capsys.readouterr().out
    lines = short.splitlines()
    assert lines[0] == "vgg-a on 2 workers of lab-1gbit:"
    table = next(number for number, line in enumerate(lines) if line.startswith("strategy"))
    assert lines[1].startswith(("Use ",))
    assert 1 < table < 8
    assert "--all shows everything" in short
    assert "memory" not in lines[table]
    assert len(lines) < 50
    print_plan(found, everything=True)
    whole = capsys.readouterr().out
    assert "memory" in whole
    assert "what these figures do not include:" in whole
    assert len(whole.splitlines()) > 2 * len(lines)


def test_the_speed_up_of_a_trial_that_missed_its_goal_is_a_limit_and_stands_last(outlook: Outlook) -> None:
    """One worker reaches the goal in 3 s; the trial of local SGD ended after 2 s, at half of its way."""

    def tried(name: str, end: float | None, seconds: float) -> Found:
        return Found(name, (Trial(name, 4, 0.1, 0, 0.9, "target" if end else "time", end, seconds, 3, 9, 0.5, 0.5),))

    slow = "local_sgd(period=8)"
    advice = advise(outlook, (), [tried(ALONE, 3.0, 3.0), tried("all_reduce", 4.0, 4.0), tried(slow, None, 2.0)])
    cells = {row[0]: row[1] for row in predictions(advice).rows}
    assert cells[ALONE] == "1.00"
    assert cells["all_reduce"] == "0.750"
    assert cells[slow].startswith("< ")
    assert list(cells)[-1] == slow
    assert PlanResult(outlook, advice).document()["strategies"][-1]["limit"]
