"""A plan before a run: its figures against rehearsals, its scaling, crossovers and refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from flockstep.cli.app import run
from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_reading import load_cluster, read_cluster
from flockstep.errors import ConfigurationError
from flockstep.planning.criteria import need
from flockstep.planning.plan import KEEN, Outlook, combines, plan
from flockstep.planning.prospect import ALONE, alone, pace, prospect
from flockstep.planning.rehearsal import rehearse
from flockstep.planning.scaling import best, faster
from flockstep.planning.task import Site, Task, task_of
from flockstep.simulation.law import mean_of
from flockstep.strategies.base import Strategy

FEW = ("all_reduce", "ps", "ps(consistency=asynchronous)", "local_sgd(period=8)", "all_reduce(codec=half)")
TASK = Task("stand-in", 100_000, ((400, 200), (20_000,)))


def cluster(bandwidth: str = "1gbit", compute: str = "constant(0.01)", count: int = 4, more: str = "") -> ClusterShape:
    text = f'compute = "{compute}"\n{more}\n[nodes.machines]\ncount = {count}\n[[links]]\ninside = "machines"\n'
    return read_cluster(text + f'bandwidth = "{bandwidth}"\nlatency = "50us"\n', name="test")


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    return plan(TASK, cluster("100mbit"), strategies=FEW)


@pytest.mark.parametrize("text", [*FEW[:4], "scatter_reduce"])
def test_forms_and_rehearsals_agree(text: str) -> None:
    shape = cluster("100mbit")
    found = prospect(Strategy.parse(text), Site(TASK, shape), 4)
    assert found.source == "form"
    laws = shape.compute(), shape.network()
    played = rehearse(Strategy.parse(text), 4, TASK.nbytes, *laws, tensors=TASK.sizes, steps=200)
    assert found.seconds == pytest.approx(played.seconds_per_step, rel=0.06)
    assert found.sent == pytest.approx(played.sent_per_step, rel=0.12)


def test_what_has_no_form_is_rehearsed_and_says_so() -> None:
    found = plan(TASK, cluster(), strategies=("all_reduce", "tree_server"), further=False)
    assert found.named("tree_server").source == "rehearsal"
    assert found.named("all_reduce").source == "form"
    assert any("rehearsed" in said for said in found.left_out)
    quick = plan(TASK, cluster(), rehearse=False, further=False)
    assert "tree_server" in {name for name, _ in quick.refused}
    assert all(one.source == "form" for one in quick.prospects)


def test_uneven_links_are_rehearsed_with_few_workers() -> None:
    found = plan(TASK, load_cluster("two-sites"), strategies=("all_reduce",), further=False)
    assert found.named("all_reduce").source == "rehearsal"


def test_ranked_by_samples_a_second(outlook: Outlook) -> None:
    rates = [one.samples_per_second for one in outlook.prospects]
    assert rates == sorted(rates, reverse=True)
    assert {one.name for one in outlook.prospects} >= {ALONE, "all_reduce", "local_sgd(period=8)"}
    assert outlook.alone.seconds == pytest.approx(0.01, rel=0.02)


def test_a_pace_is_exact_where_it_was_taken() -> None:
    for law in ("constant(0.01)", "lognormal(0.01, sigma=0.4)", "slow_spells(constant(0.01), 0.05, 4, 5)"):
        site = Site(TASK, cluster("100mbit", law))
        for text in FEW:
            found = prospect(Strategy.parse(text), site, 4)
            known = pace(found, site)
            assert known is not None
            slack = 0.02 if known.exposure == 0 else 1e-6  # never less than with constant times
            assert known.seconds(site, 4) == pytest.approx(found.seconds, rel=slack)
            assert known.samples_per_second(site, 4) == pytest.approx(found.samples_per_second, rel=slack)


def test_barriers_are_exposed_to_stragglers_and_asynchrony_is_not() -> None:
    site = Site(TASK, cluster("10gbit"))
    exposure = {text: pace(prospect(Strategy.parse(text), site, 4), site) for text in FEW}
    assert exposure["all_reduce"] is not None
    assert exposure["ps(consistency=asynchronous)"] is not None
    assert exposure["all_reduce"].exposure > 0.8
    assert exposure["ps(consistency=asynchronous)"].exposure < 0.2


def test_scaling_stops_where_the_server_is_full(outlook: Outlook) -> None:
    curves = {one.name: one for one in outlook.curves}
    server, ring = curves["ps(consistency=bsp)"], curves["all_reduce"]
    assert server.pays_to < ring.pays_to
    full = outlook.site.link[1] / (TASK.nbytes) * TASK.batch
    assert server.samples_per_second[-1] == pytest.approx(full, rel=0.2)
    assert ring.workers == tuple(1 << power for power in range(11))


def test_crossovers_are_where_the_best_changes(outlook: Outlook) -> None:
    assert {one.quantity for one in outlook.crossovers} >= {"bandwidth", "parameters"}
    rivals = [one for one in outlook.contenders if combines(one.found)]
    assert len(rivals) <= KEEN + 1
    for one in outlook.crossovers:
        if one.quantity != "bandwidth":
            continue
        for factor, name in ((0.8, one.below), (1.25, one.above)):
            shape = faster(outlook.site.cluster, factor * one.value / one.here)
            two = [rival for rival in rivals if rival.name in (one.below, one.above)]  # a third may be in between
            assert best(two, dataclasses.replace(outlook.site, cluster=shape), outlook.workers) == name


def test_messages_that_would_pile_up_count() -> None:
    found = prospect(Strategy.parse("broadcast"), Site(TASK, cluster("1mbit")), 4)
    assert found.seconds >= found.sent / 125_000
    assert any("pile up" in note for note in found.notes)


def test_a_sample_is_worth_less_the_staler_it_is() -> None:
    site = Site(TASK, cluster("10gbit", count=64))
    few, many, plain = (
        need(prospect(Strategy.parse(text), site, n), site)
        for text, n in (("ps(consistency=asynchronous)", 4), ("ps(consistency=asynchronous)", 64), ("all_reduce", 4))
    )
    assert many > few > plain > 1
    assert need(alone(site), site) == 1


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


def test_too_many_to_rehearse_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="too many to rehearse"):
        prospect(Strategy.parse("tree_server"), Site(TASK, cluster(count=100)), 100)


def test_hogwild_needs_one_machine() -> None:
    found = plan(TASK, cluster(), strategies=("hogwild",), further=False)
    assert [name for name, _ in found.refused] == ["hogwild"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "softmax", "--cluster", "lab-1gbit", "-n", "4", "--out", str(page)]
    strategies = [word for text in ("all_reduce", "local_sgd") for word in ("-s", text)]
    assert run([*words, *strategies, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {one["name"] for one in said["strategies"]} == {"all_reduce", "local_sgd", ALONE}
    assert said["advice"]["choice"] in {"all_reduce", "local_sgd", ALONE}
    text = page.read_text()
    assert "Where what is best" in text
    assert "<script src" not in text
    assert run([*words[:6], *strategies]) == 0
    assert "softmax on 4 workers of lab-1gbit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["softmax", "--cluster", "lab"], "lab"),
        (["softmax", "--need", "speed"], "need"),
        (["softmax", "--out", "plan.txt"], ".html"),
        (["softmax", "-n", "0"], "workers"),
        (["softmax", "-s", "all_reduse"], "all_reduse"),
    ],
)
def test_wrong_words_are_refused(words: list[str], rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *words]) == 2
    assert rule in capsys.readouterr().err
