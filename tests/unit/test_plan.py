"""A plan before a run: its figures against rehearsals, its scaling, crossovers and refusals."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flockstep
from flockstep.cli.app import run
from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_reading import load_cluster, read_cluster
from flockstep.costs.clusters import names
from flockstep.errors import ConfigurationError, RunError
from flockstep.planning import step_prediction
from flockstep.planning.advice import advise, slower, value
from flockstep.planning.advice_text import quantity
from flockstep.planning.check import Check, Figures, check_cells
from flockstep.planning.criteria import DOUBT, relative_samples
from flockstep.planning.job_profile import NOISE, JobProfile, Site, task_of
from flockstep.planning.plan import MOST, Outlook, candidates, combines, plan
from flockstep.planning.plan_text import (
    HEADINGS,
    TABLE_2,
    as_much,
    cells,
    exposed,
    many,
    row_of_table_2,
    ruled_out,
    scaling,
    scaling_sentence,
    short,
)
from flockstep.planning.scaling import Crossover, Curve, best
from flockstep.planning.step_prediction import (
    ALONE,
    Pace,
    Unpredictable,
    alone,
    faster,
    grown,
    predict_step,
    rehearsed,
)
from flockstep.records.folder import RunFolder
from flockstep.simulation.law import mean_of
from flockstep.strategies.base import Strategy

FEW = ("all_reduce", "ps", "ps(consistency=asynchronous)", "local_sgd(period=8)", "all_reduce(codec=half)")
TASK = JobProfile("surrogate", 100_000, ((400, 200), (20_000,)))


def cluster(bandwidth: str = "1gbit", compute: str = "constant(0.01)", count: int = 4, more: str = "") -> ClusterShape:
    text = f'compute = "{compute}"\n{more}\n[nodes.machines]\ncount = {count}\n[[links]]\ninside = "machines"\n'
    return read_cluster(text + f'bandwidth = "{bandwidth}"\nlatency = "50us"\n', name="test")


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


def test_servers_share_the_cards_of_workers_in_extrapolations_too() -> None:
    """16 workers are rehearsed, 17 extrapolated; with a card for each of the 16 shards steps would be half as long."""
    site, sharded = Site(TASK, cluster("10mbit", count=17)), Strategy.parse("ps(consistency=asynchronous, shards=16)")
    few, many = (predict_step(sharded, site, workers).seconds for workers in (16, 17))
    assert many == pytest.approx(few, rel=0.05)


@pytest.mark.parametrize("text", ["all_reduce", "ps", "dpsgd", "all_reduce(collective=binomial_tree)"])
def test_many_workers_are_what_all_of_them_would_take(text: str) -> None:
    """The extrapolation to 32 workers is close to a rehearsal of all 32."""
    site, strategy = Site(TASK, cluster("100mbit", count=32)), Strategy.parse(text)
    found = predict_step(strategy, site, 32)
    assert found.source == "extrapolation"
    played = rehearsed(strategy, site, 32, quick=True)
    assert found.seconds == pytest.approx(played.seconds_per_step, rel=0.05)
    assert found.sent_bytes == pytest.approx(played.sent_bytes_per_step, rel=0.05)


@pytest.mark.parametrize("shape", [
    lambda n: 3 + 0.5 * n, lambda n: 1 + math.log2(n), lambda n: 2 * (n - 1) + 7 * (1 - 1 / n), lambda n: 4.0
])  # fmt: skip
def test_what_grows_is_told_by_its_shape(shape: Callable[[int], float]) -> None:
    sizes = (4, 8, 16)
    assert grown(sizes, [shape(n) for n in sizes], 1024) == pytest.approx(shape(1024), rel=1e-6)
    assert grown(sizes, [0.0] * 3, 64) == 0
    assert grown(sizes, [n**2 for n in sizes], 64) < 64**2  # no term of those that costs have


def test_uneven_links_are_rehearsed_with_few_workers() -> None:
    found = plan(TASK, load_cluster("two-sites"), strategies=("all_reduce",), further=False)
    assert found.named("all_reduce").source == "rehearsal"


def test_ranked_by_what_samples_are_worth(outlook: Outlook) -> None:
    speedups = [outlook.effective_rate(one) for one in outlook.predictions]
    assert speedups == sorted(speedups, reverse=True)
    assert {one.name for one in outlook.predictions} >= {ALONE, "all_reduce", "local_sgd(period=8)"}
    assert outlook.alone.seconds == pytest.approx(0.01, rel=0.02)


def test_a_pace_is_exact_where_it_was_taken() -> None:
    for law in ("constant(0.01)", "lognormal(0.01, sigma=0.4)", "slow_spells(constant(0.01), 0.05, 4, 5)"):
        site = Site(TASK, cluster("100mbit", law))
        for text in FEW:
            found = predict_step(Strategy.parse(text), site, 4)
            here = Pace(Strategy.parse(text), site, found).at(site, 4)
            assert here.seconds == pytest.approx(found.seconds, rel=1e-6)
            assert here.samples_per_second == pytest.approx(found.samples_per_second, rel=1e-6)


def test_barriers_are_exposed_to_stragglers_and_asynchrony_is_not() -> None:
    site = Site(TASK, cluster("10gbit"))
    strategies = {text: Strategy.parse(text) for text in FEW}
    exposure = {text: Pace(one, site, predict_step(one, site, 4)).exposure for text, one in strategies.items()}
    assert exposure["all_reduce"] > 0.8
    assert exposure["ps(consistency=asynchronous)"] < 0.2


def test_scaling_stops_where_the_server_is_full(outlook: Outlook) -> None:
    curves = {one.name: one for one in outlook.curves}
    server, ring = curves["ps(consistency=bsp)"], curves["all_reduce"]
    assert server.pays_to < ring.pays_to
    full = outlook.site.link[1] / (TASK.nbytes) * TASK.batch
    assert server.samples_per_second[-1] == pytest.approx(full, rel=0.2)
    assert ring.workers == tuple(1 << power for power in range(11))


def test_scaling_goes_by_what_samples_are_worth() -> None:
    """Samples of n workers in step are worth (1 + r) / (n + r) each; without waiting updates are late by n - 1."""
    made = plan(TASK, cluster("1000gbit"), strategies=("all_reduce", "ps(consistency=asynchronous)"))
    curves = {one.name: one for one in made.curves}
    ring, free = curves["all_reduce"], curves["ps(consistency=asynchronous)"]
    single = made.alone.samples_per_second
    for n, rate, speedup in zip(ring.workers, ring.samples_per_second, ring.speedups, strict=True):
        assert speedup == pytest.approx(rate / single * (1 + NOISE) / (n + NOISE), rel=1e-6)
    for n, rate, speedup in zip(free.workers, free.samples_per_second, free.speedups, strict=True):
        stable = 1 / math.sin(math.pi / (2 * (2 * (n - 1) + 1)))
        assert speedup == pytest.approx(rate / single * (1 + NOISE) / (stable + NOISE) / DOUBT, rel=0.05)
    assert ring.samples_per_second[-1] == max(ring.samples_per_second)
    assert (ring.pays_to, free.pays_to) == (8, 16)  # doubling them once more gives less than a tenth
    advice = advise(made)
    for one in made.curves:
        assert dict(zip(one.workers, one.speedups, strict=True))[4] == pytest.approx(
            advice.speedups[one.name], rel=0.01
        )


def test_a_strategy_has_the_name_under_which_it_was_written() -> None:
    site = Site(TASK, cluster("1gbit"))
    names = [name for name, _ in candidates((), site)]
    assert {"asgd", "bsp", "gossip"} <= set(names)
    assert "ps(consistency=asynchronous)" not in names
    written = ("asgd", "ps(bsp)", "gosgd", "ps(asynchronous)")
    assert [name for name, _ in candidates(written, site)] == ["asgd", "ps(consistency=bsp)", "gosgd"]
    found = plan(TASK, cluster("1gbit"), strategies=("asgd",), further=False)
    assert [one.name for one in found.predictions if one.strategy is not None] == ["asgd"]
    assert found.named("ps(consistency=asynchronous)") is found.named("asgd")


def test_samples_that_are_worth_little_do_not_beat_one_worker() -> None:
    """Gossip on edge gets through ten times the samples of one worker, and is worth 0.7 of it."""
    made = plan(task_of("digits"), load_cluster("edge"), strategies=("gossip",))
    (gossip,) = made.curves
    assert gossip.samples_per_second[4] > 8 * made.alone.samples_per_second
    assert gossip.beats_one_from is None
    assert scaling_sentence(gossip) == "gossip is not faster than one worker with any number of workers"


def test_crossovers_are_the_nearest_places_where_the_choice_is_overtaken(outlook: Outlook) -> None:
    advice = advise(outlook)
    assert advice.choice is not None
    assert {one.quantity for one in advice.crossovers} >= {"bandwidth", "parameters"}
    others = [one for one in outlook.scalable if combines(one.found)]
    for one in advice.crossovers:
        assert advice.choice.name == (one.below if one.value > one.here else one.above)
        if one.quantity != "bandwidth":
            continue
        for factor, name in ((0.8, one.below), (1.25, one.above)):
            shape = faster(outlook.site.cluster, factor * one.value / one.here)
            two = [other for other in others if other.name in (one.below, one.above)]  # a third may be in between
            assert best(two, dataclasses.replace(outlook.site, cluster=shape), outlook.workers) == name
        steps = [one.here * (one.value / one.here) ** (part / 8) for part in range(8)]
        for bandwidth in steps:
            site = dataclasses.replace(outlook.site, cluster=faster(outlook.site.cluster, bandwidth / one.here))
            assert best(others, site, outlook.workers) == advice.choice.name


def test_crossovers_leave_out_what_needs_rule_out(outlook: Outlook) -> None:
    for wanted in ("unbalanced", "reproducible", "slow-links"):
        advice = advise(outlook, (wanted,))
        out = {name for name, _ in advice.excluded}
        assert not out & {name for one in advice.crossovers for name in (one.below, one.above)}
        assert not any(f", {name} would be recommended" in said for said in advice.changes for name in out)


def test_crossovers_are_by_the_value_that_advice_goes_by(outlook: Outlook) -> None:
    for requirements in ((), ("slow-links",)):
        slow = slower(requirements)
        for one in outlook.scalable:
            there = one.effective_rate(outlook.site, outlook.workers, slower=slow)
            assert there == pytest.approx(value(one.found, outlook, requirements), rel=0.03)


def test_crossovers_with_unbalanced_data_are_by_the_value_that_advice_goes_by() -> None:
    uneven = read_cluster(
        'compute = "constant(0.02)"\n[nodes.fast]\ncount = 2\n[nodes.slow]\ncount = 2\nspeed = 0.25\n'
        '[[links]]\ninside = ["fast", "slow"]\nbandwidth = "1gbit"\nlatency = "50us"\n',
        name="uneven",
    )
    found = plan(TASK, uneven, strategies=("ps", "ps(consistency=asynchronous)"), further=False)
    for one in found.scalable:
        there = one.effective_rate(found.site, found.workers, unbalanced=True)
        assert there == pytest.approx(value(one.found, found, ("unbalanced",)), rel=0.03)


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
    for workers in (4, 32):  # rehearsed and extrapolated
        with pytest.raises(Unpredictable, match=r"cannot be predicted: after \d+ steps of a rehearsal"):
            predict_step(strategy, site, workers)
    found = plan(TASK, cluster("1gbit"), strategies=("all_reduce",), further=False)
    assert [name for name, why in found.refused if "cannot be predicted" in why] == ["all_reduce"]


def test_steps_are_extrapolated_from_longer_rehearsals_if_the_halves_of_quick_ones_differ_much() -> None:
    """In a quick rehearsal, workers wait for a mean in one of two periods."""
    few, many = (predict_step(Strategy.parse("overlap_local_sgd"), Site(TASK, cluster("1mbit")), n) for n in (16, 32))
    assert many.seconds > few.seconds > 0.4


@pytest.mark.full
def test_plans_for_many_workers_of_the_clusters_have_entries() -> None:
    strategies = ("all_reduce", "local_sgd", "overlap_local_sgd", "streaming_diloco", "asgd")
    for name in names():
        found = plan(TASK, load_cluster(name), 32, strategies=strategies, further=False)
        assert {one.name for one in found.predictions} == {ALONE, *strategies}, (name, found.refused)


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


def test_a_range_stands_beside_the_step() -> None:
    uneven = plan(TASK, cluster("1gbit", HEAVY, count=12), strategies=("dpsgd",), further=False)
    step = dict(zip(HEADINGS, cells(uneven, uneven.named("dpsgd"), 1.0), strict=True))["step"]
    assert re.fullmatch(r"[\d.]+ ms ± \d+ %", step)
    steady = plan(TASK, cluster("1gbit"), strategies=("dpsgd",), further=False)
    assert "±" not in dict(zip(HEADINGS, cells(steady, steady.named("dpsgd"), 1.0), strict=True))["step"]


def test_work_sets_the_time_of_a_gradient_where_it_is_known() -> None:
    shape = cluster(more='operations = "1G/s"')
    site = Site(dataclasses.replace(TASK, work=2e9), shape)
    assert mean_of(site.compute(4)) == pytest.approx(2.0)
    assert Site(TASK, shape).seconds is None
    assert any("whatever the job" in said for said in Site(TASK, shape).assumptions())


def test_reference_models_and_jobs_have_sizes() -> None:
    assert task_of("vgg-a").elements == pytest.approx(133e6, rel=0.01)
    softmax = task_of("softmax", batch=7)
    assert softmax.batch == 7
    assert sum(softmax.sizes) == softmax.elements
    with pytest.raises(ConfigurationError, match="sotfmax"):
        task_of("sotfmax")
    with pytest.raises(ConfigurationError, match="batch"):
        task_of("softmax", batch=0)


def test_more_workers_than_the_cluster_has_are_said_to_be_more_of_the_same() -> None:
    def said(shape: ClusterShape, workers: int | None) -> str:
        found = plan(TASK, shape, workers, strategies=("all_reduce",), further=False)
        return "; ".join(found.left_out)

    assert "test has 4 workers: 9 are assumed to run on 9 machines of the same kind instead of 4" in said(cluster(), 9)
    assert "laptop has 4 workers: 5 are assumed to share its machines" in said(load_cluster("laptop"), 5)
    for workers in (None, 4, 2):
        assert "are taken" not in said(cluster(), workers)


@pytest.mark.parametrize(("count", "workers"), [(4, MOST + 1), (10**6, None)])
def test_a_plan_for_too_many_workers_is_refused_at_once(count: int, workers: int | None) -> None:
    with pytest.raises(
        ConfigurationError, match=f"at most 1,024 workers, got {workers or count:,}; give at most 1,024"
    ):
        plan(TASK, cluster(count=count), workers)


def test_hogwild_needs_one_machine() -> None:
    found = plan(TASK, cluster(), strategies=("hogwild",), further=False)
    assert [name for name, _ in found.refused] == ["hogwild"]


def test_a_custom_strategy_that_ends_in_a_deadlock_does_not_end_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(strategy: Strategy, *arguments: Any) -> Any:
        if str(strategy).startswith("gossip"):
            raise RunError("deadlock: every program waits")
        return predict_step(strategy, *arguments)

    monkeypatch.setattr("flockstep.planning.plan.predict_step", predict)
    found = plan(TASK, cluster(), strategies=("gossip", "all_reduce"), further=False)
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
    assert "Best strategy by bandwidth and number of parameters" in text
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
    assert "default: (laptop" in " ".join(capsys.readouterr().out.replace("│", " ").split())


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


@pytest.mark.parametrize(("module", "search"), [("advice", "crossovers"), ("plan", "curve")])
def test_a_plan_that_is_interrupted_after_its_predictions_prints_them(
    module: str, search: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    words = [
        "plan",
        "softmax",
        "--budget",
        "0",
        "-c",
        "lab-1gbit",
        "-n",
        "4",
        "-s",
        "all_reduce",
        "-s",
        "local_sgd",
        "--json",
    ]
    assert run(words) == 0
    whole = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(importlib.import_module(f"flockstep.planning.{module}"), search, stopped)
    assert run(words) == 130
    said = capsys.readouterr()
    rest = json.loads(said.out)
    assert said.err.endswith(
        "flockstep: interrupted; this plan does not show how the strategies scale, nor which conditions "
        "would change the recommendation\n"
    )
    assert rest["strategies"] == whole["strategies"]
    assert rest["advice"]["choice"] == whole["advice"]["choice"]
    assert (rest["scaling"], rest["advice"]["crossovers"]) == ([], [])
    assert whole["scaling"]
    assert whole["advice"]["crossovers"]
    assert run(words[:-1]) == 130
    assert "softmax on 4 workers of lab-1gbit" in capsys.readouterr().out


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
    one = Curve("ps", (1, 2, 4, 8), (10.0, 10.5, 11.0, 11.5), (0.9, 1.05, 1.1, 1.15), 1, 2, 8)
    assert (
        scaling_sentence(one)
        == "ps is faster than one worker with 2 or more workers; doubling the number of workers always gains "
        "less than 10 % in speed"
    )
    few = dataclasses.replace(one, beats_one_to=4)
    assert scaling_sentence(few).startswith("ps is faster than one worker with 2 to 4 workers; doubling")
    alone = dataclasses.replace(one, beats_one_from=4, beats_one_to=4)
    assert scaling_sentence(alone).startswith("ps is faster than one worker with 4 workers only; doubling")
    far = dataclasses.replace(one, pays_to=8)
    assert scaling_sentence(far).endswith(
        "up to 8 workers, doubling the number of workers gains at least 10 % in speed"
    )
    assert scaling([one], [("ps", "x")]) == (f"{scaling_sentence(one)} (ruled out)",)
    assert ruled_out([("a", "x"), ("b", "y"), ("c", "x")]) == ("a, c: x", "b: y")


def test_crossovers_in_words() -> None:
    one = Crossover("bandwidth", 4.9943e10, 1.25e8, "a", "b")
    assert quantity(one, "above") == "if the slowest link had more than 400 Gbit/s (now 1 Gbit/s)"
    assert quantity(dataclasses.replace(one, quantity="straggling", value=3e-4), "above").startswith(
        "if workers were sometimes slow"
    )
    rare = dataclasses.replace(one, quantity="straggling", value=0.04)
    assert quantity(rare, "above") == "if a worker became slow in more than 4 % of its steps"


def test_errors_that_round_to_nothing_have_no_sign() -> None:
    figures = Figures(1.0, 100.0, 1.0, None)
    slow = dataclasses.replace(figures, seconds=1.0001)
    row = check_cells(Check("softmax", "ps", 2, "lab", "rehearsal", figures, slow))
    assert row[4] == row[10] == "0 %"
    far = check_cells(Check("softmax", "ps", 2, "lab", "rehearsal", figures, dataclasses.replace(figures, seconds=0.8)))
    assert far[4] == "+25.0 %"


def test_lateness_is_the_same_in_the_table_and_in_the_text() -> None:
    found = plan(TASK, cluster("10gbit"), strategies=("gossip", "all_reduce", "ensemble"), further=False)
    row = dict(zip(HEADINGS, cells(found, found.named("gossip"), 1.0), strict=True))
    assert any(f"{row['staleness']} versions late" in said for said in found.departures(found.named("gossip")))
    assert (
        dict(zip(TABLE_2, row_of_table_2(found, found.named("gossip")), strict=True))["staleness"] == row["staleness"]
    )
    assert dict(zip(HEADINGS, cells(found, found.named("ensemble"), 1.0), strict=True))["staleness"] == "–"


def test_a_plan_begins_with_its_advice_and_shows_what_matters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = importlib.import_module("flockstep.cli.plan")
    monkeypatch.setattr(command, "_outlook", functools.cache(command._outlook))  # one plan is shown twice
    words = ["plan", "vgg-a", "-c", "lab-1gbit", "-n", "2"]
    assert run(words) == 0
    short = capsys.readouterr().out
    lines = short.splitlines()
    assert lines[0] == "vgg-a on 2 workers of lab-1gbit:"
    table = next(number for number, line in enumerate(lines) if line.startswith("strategy"))
    assert lines[1].startswith(("Use ",))
    assert 1 < table < 8
    assert "--all shows everything" in short
    assert "memory" not in lines[table]
    assert len(lines) < 50
    assert run([*words, "--all"]) == 0
    whole = capsys.readouterr().out
    assert "memory" in whole
    assert "what these figures do not include:" in whole
    assert len(whole.splitlines()) > 2 * len(lines)
