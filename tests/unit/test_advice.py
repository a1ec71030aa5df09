"""Advice: where the answer is known, it is given; needs rule out what they must."""

from __future__ import annotations

import pytest

from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_reading import read_cluster
from flockstep.errors import UnknownName
from flockstep.planning.advice import NEEDS, Advice, advise, value
from flockstep.planning.plan import Outlook, plan
from flockstep.planning.prospect import ALONE
from flockstep.planning.task import Task

TASK = Task("stand-in", 1_000_000, ((1000, 1000),))
SOME = (
    "all_reduce",
    "ps",
    "ps(consistency=asynchronous)",
    "ps(consistency=ssp(3))",
    "local_sgd(period=8)",
    "all_reduce(codec=topk, feedback=residual)",
    "powersgd",
    "easgd",
    "ensemble",
    "gradient_coding",
)


def cluster(bandwidth: str, compute: str = "constant(0.02)", count: int = 8, more: str = "") -> ClusterShape:
    text = f'compute = "{compute}"\n[nodes.machines]\ncount = {count}\n{more}\n[[links]]\ninside = "machines"\n'
    return read_cluster(text + f'bandwidth = "{bandwidth}"\nlatency = "50us"\n', name="test")


def outlook(bandwidth: str, compute: str = "constant(0.02)", count: int = 8, more: str = "") -> Outlook:
    return plan(TASK, cluster(bandwidth, compute, count, more), strategies=SOME, further=False)


def lossless(advice: Advice) -> bool:
    return advice.choice.lossless and advice.choice.name != "powersgd"


@pytest.mark.parametrize("bandwidth", ["10kbit", "100kbit"])
def test_one_worker_where_links_are_hopeless(bandwidth: str) -> None:
    advice = advise(outlook(bandwidth))
    assert advice.choice.name == ALONE
    assert advice.sentences[0].startswith("Stay on one worker")


@pytest.mark.parametrize(("bandwidth", "count"), [("100gbit", 8), ("25gbit", 8), ("100gbit", 32)])
def test_no_compression_where_links_are_fast(bandwidth: str, count: int) -> None:
    advice = advise(outlook(bandwidth, count=count))
    assert lossless(advice)
    assert advice.choice.name in ("all_reduce", "ps(consistency=bsp)")
    assert any("Do not compress" in said for said in advice.sentences)


def test_asynchrony_or_local_steps_where_workers_straggle() -> None:
    slow = "slow_spells(constant(0.02), 0.05, 20, 10)"
    assert advise(outlook("100gbit", count=4)).choice.name in ("all_reduce", "ps(consistency=bsp)")
    advice = advise(outlook("100gbit", slow, count=4))
    assert advice.choice.name in ("ps(consistency=asynchronous)", "easgd", "ps(consistency=ssp(s=3))")


def test_needs_rule_out() -> None:
    predicted = outlook("1gbit")
    for need, kept in (
        ("unbalanced", {"all_reduce", "ps(consistency=bsp)"}),
        ("reproducible", {"all_reduce", "local_sgd(period=8)"}),
        ("elastic", {"easgd", "gradient_coding"}),
    ):
        out = {name for name, _ in advise(predicted, (need,)).excluded}
        assert not kept & out
        assert "ensemble" in out
    out = {need: {name for name, _ in advise(predicted, (need,)).excluded} for need in NEEDS}
    assert "local_sgd(period=8)" in out["unbalanced"]
    assert "ps(consistency=asynchronous)" in out["reproducible"]
    assert "all_reduce" in out["elastic"]
    assert ALONE in out["private"]
    assert advise(predicted, ("private",)).choice.name != ALONE


def test_clusters_that_come_and_go_need_no_telling() -> None:
    advice = advise(outlook("100gbit", more="comes_and_goes = true"))
    assert advice.needs == ("elastic",)
    assert advice.choice.strategy is None or advice.choice.strategy.traits.survives


def test_memory_rules_out() -> None:
    advice = advise(outlook("100gbit", more='memory = "13MB"'))
    out = dict(advice.excluded)
    assert "all_reduce(codec=topk, feedback=residual)" in out or "easgd" in out
    assert advice.choice.memory <= 13e6


def test_a_need_that_is_not_known() -> None:
    with pytest.raises(UnknownName, match="reproducible"):
        advise(outlook("1gbit"), ("reproducable",))


def test_advice_says_why_and_what_would_change_it() -> None:
    predicted = plan(TASK, cluster("1gbit"), strategies=SOME)
    advice = advise(predicted, ("slow-links",))
    assert advice.runner_up is not None
    assert advice.runner_up is not advice.choice
    assert any("slowest link" in said for said in advice.reasons)
    assert any("Table 2" in said for said in advice.reasons) or advice.choice.name == ALONE
    ends = [one for one in predicted.crossovers if advice.choice.name in (one.below, one.above)]
    assert len(advice.changes) >= len(ends) + 1
    assert advice.document()["choice"] == advice.choice.name


def test_criteria_are_those_of_the_plan() -> None:
    predicted = plan(TASK, cluster("10gbit"), strategies=SOME)
    plain = predicted.criteria(predicted.named("all_reduce"))
    free = predicted.criteria(predicted.named("ps(consistency=asynchronous)"))
    assert (plain.technique, plain.learning_rate, plain.reproducible) == ("central, synchronous", "higher", "easy")
    assert (free.learning_rate, free.reproducible, free.survives) == ("lower", "hard", True)
    assert free.overlap == pytest.approx(7, rel=0.05)
    assert not plain.balanced_data
    assert free.balanced_data
    assert plain.exposure is not None
    assert free.exposure is not None
    assert plain.exposure > free.exposure


def test_better_links_never_make_the_best_worth_less() -> None:
    worths = []
    for mbit in (0.1, 1, 10, 100, 1000, 10000):
        predicted = outlook(f"{mbit}mbit")
        worths.append(value(advise(predicted).choice, predicted, ()))
    assert worths == sorted(worths)
