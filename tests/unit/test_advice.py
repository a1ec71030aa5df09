"""Advice: where the answer is known, it is given; needs rule out what they must."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import shlex
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

from flockstep.codecs.base import Codec
from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_file import read_cluster
from flockstep.errors import UnknownName
from flockstep.optimizers.sgd import SGD
from flockstep.planning.advice import DROPS, REQUIREMENTS, Advice, advise, value
from flockstep.planning.criteria import (
    DOUBT,
    DROPPING,
    approximates,
    criteria,
    departures,
    is_central,
    is_synchronous,
    lost,
    relative_samples,
)
from flockstep.planning.job_profile import NOISE, JobProfile, Site, task_of
from flockstep.planning.plan import Outlook, plan
from flockstep.planning.step_prediction import ALONE, predict_step
from flockstep.strategies.base import Strategy
from flockstep.strategies.encoding import codecs_of
from support.clusters import equal_machines
from support.matrix import few

TASK = JobProfile("surrogate", 1_000_000, ((1000, 1000),))
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
    return equal_machines(bandwidth, compute, count, more)


@lru_cache
def outlook(bandwidth: str, compute: str = "constant(0.02)", count: int = 8, more: str = "") -> Outlook:
    return plan(TASK, cluster(bandwidth, compute, count, more), strategies=SOME)


def lossless(advice: Advice) -> bool:
    return advice.choice.lossless and advice.choice.name != "powersgd"


@pytest.mark.parametrize("bandwidth", ["10kbit", "100kbit"])
def test_one_worker_where_links_are_hopeless(bandwidth: str) -> None:
    advice = advise(outlook(bandwidth))
    assert advice.choice.name == ALONE
    assert advice.sentences[0].startswith("Use one worker")


def test_delays_count_in_steps_of_the_workers_that_compute_most() -> None:
    """Half of the workers wait for a model for minutes; the others compute 1,000 gradients meanwhile."""
    predicted = plan(replace(TASK, known_noise=35.0), cluster("10kbit"), strategies=("adpsgd",))
    pairs = next(found for found in predicted.predictions if found.name == "adpsgd")
    assert pairs.samples_per_second > 2 * predicted.alone.samples_per_second
    assert advise(predicted).speedups[pairs.name] < 0.1


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
    for wanted, kept in (
        ("unbalanced", {"all_reduce", "ps(consistency=bsp)"}),
        ("reproducible", {"all_reduce", "local_sgd(period=8)"}),
        ("elastic", {"easgd", "ps(consistency=asynchronous)"}),
        ("private", {"local_sgd(period=8)", "easgd", "ps(consistency=asynchronous)", "all_reduce"}),
    ):
        out = {name for name, _ in advise(predicted, (wanted,)).excluded}
        assert not kept & out
        assert "ensemble" in out
    out = {one: {name for name, _ in advise(predicted, (one,)).excluded} for one in REQUIREMENTS}
    assert "local_sgd(period=8)" in out["unbalanced"]
    assert "ps(consistency=asynchronous)" in out["reproducible"]
    assert "all_reduce" in out["elastic"]
    assert ALONE in out["private"]
    assert advise(predicted, ("private",)).choice.name != ALONE


def test_clusters_that_come_and_go_need_no_telling() -> None:
    advice = advise(outlook("100gbit", more="comes_and_goes = true"))
    assert advice.requirements == ("elastic",)
    assert advice.choice.strategy is None or advice.choice.strategy.traits.survives


def test_memory_rules_out() -> None:
    advice = advise(outlook("100gbit", more='memory = "11MB"'))
    out = dict(advice.excluded)
    assert "all_reduce(codec=topk, feedback=residual)" in out or "easgd" in out
    assert advice.choice.memory <= 11e6


def test_where_nothing_fits_it_is_said_and_why() -> None:
    advice = advise(outlook("100gbit", more='memory = "1MB"'))
    assert advice.choice is None
    assert advice.document()["choice"] is None
    said = advice.sentences[0]
    assert said.startswith("No strategy meets the requirements: one worker needs 8.00 MB and has 1.00 MB; ")
    assert len(advice.excluded) == len(advice.speedups)
    only = plan(TASK, cluster("1gbit"), strategies=("all_reduce", "gossip"))
    advice = advise(plan(TASK, cluster("1gbit"), strategies=("all_reduce",)), ("private", "elastic"))
    assert advice.choice is None
    assert "one worker: the data are on other machines" in advice.sentences[0]
    assert "1 strategy: a run stops when a worker is lost" in advice.sentences[0]
    assert "--require" in advice.sentences[1]
    assert advise(only, ("private",)).choice is not only.alone


def test_one_worker_that_does_not_fit_is_not_advised() -> None:
    only = plan(TASK, cluster("10kbit", more='memory = "7MB"'), strategies=("all_reduce",))
    assert advise(only).choice is not only.alone


def with_gain(gain: float) -> Outlook:
    """A plan whose only strategy is predicted to train `gain` times as fast as one worker."""
    found = plan(TASK, cluster("100gbit"), strategies=("all_reduce",))
    plain = found.named("all_reduce")
    rate = gain * found.relative_samples(plain) * found.alone.samples_per_second
    return dataclasses.replace(found, predictions=(replace(plain, samples_per_second=rate), found.alone))


def test_several_workers_are_advised_only_where_the_gain_is_clear() -> None:
    small, clear = with_gain(1.1), with_gain(1.25)
    advice = advise(small)
    assert advice.choice is small.alone
    assert advice.sentences[1] == (
        "all_reduce on 8 workers is predicted to train 1.10 times as fast as one worker, but predictions err by up to "
        "20 %, so several workers are recommended only if they are predicted to train at least 1.2 times as fast."
    )
    nearly = advise(with_gain(1.197)).sentences[1]
    assert "is predicted to train 1.19 times as fast" in nearly, "not rounded up to the margin"
    assert advise(clear).choice.name == "all_reduce"
    assert "if one worker were 4 % faster, it would be recommended" in advise(clear).changes  # 1.25 / 1.2
    assert advise(small, ("private",)).choice.name == "all_reduce"  # one worker is ruled out: nothing to compare with


FED = "all_reduce(codec=topk, feedback=residual)"


def test_compression_is_compared_by_worth_and_never_names_what_is_ruled_out() -> None:
    found = plan(TASK, cluster("2gbit", "constant(0.1)"), strategies=("all_reduce", FED, "all_reduce(codec=half)"))
    plain = found.named("all_reduce").samples_per_second
    rates = {ALONE: 0.01 * plain, "all_reduce": plain, "all_reduce(codec=half)": 0.1 * plain, FED: 2 * plain}
    predictions = tuple(replace(one, samples_per_second=rates[one.name]) for one in found.predictions)
    made = replace(found, predictions=predictions, measured=dict.fromkeys(rates, 1.0) | {FED: 4.0})
    (told,) = [said for said in advise(made).sentences if "compress" in said]
    assert told == (
        f"Do not compress: {FED}, the best strategy with compression, processes 2.0 times as many samples per second "
        "as all_reduce, but is predicted to train 50 % as fast."
    )
    allowed = replace(made, predictions=tuple(one for one in predictions if not approximates(one)))
    assert "compress" not in " ".join(advise(allowed).sentences)
    better = advise(replace(made, measured=dict.fromkeys(rates, 1.0)))
    assert better.choice.name == FED
    assert "Do not compress" not in " ".join(better.sentences)


def test_the_rival_of_one_worker_meets_the_needs() -> None:
    free = outlook("100kbit")
    advice = advise(free, ("reproducible",))
    assert advice.choice is free.alone
    for name, _ in advice.excluded:
        assert f"with {name}" not in " ".join((*advice.sentences, *advice.changes))


def test_how_to_measure_is_the_same_command_with_options() -> None:
    predicted = plan(task_of("softmax"), cluster("1gbit"), strategies=("all_reduce", "ps"))
    advice = advise(predicted)
    two = [one for one in (advice.choice, advice.runner_up) if one is not None and one.strategy is not None]
    said = advice.changes[-1]
    assert all(f"-s {shlex.quote(one.name)}" in said for one in two)
    assert len(two) == 2
    both = " and ".join(one.name for one in two)
    assert said.startswith(f"to measure the time to target of {both}, repeat the command with --simulate -s ")
    only = advise(plan(task_of("softmax"), cluster("1gbit"), strategies=("ps",))).changes[-1]
    assert "--simulate -s 'ps(consistency=bsp)'" in only


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
    assert len(advice.changes) == 1  # about the runner-up; there is no job to measure
    assert advice.document()["choice"] == advice.choice.name


def test_criteria_are_those_of_the_plan() -> None:
    predicted = plan(TASK, cluster("10gbit"), strategies=SOME)
    plain = criteria(predicted.named("all_reduce"), predicted.site)
    free = criteria(predicted.named("ps(consistency=asynchronous)"), predicted.site)
    assert (plain.technique, plain.learning_rate, plain.reproducible) == ("central, synchronous", "higher", "easy")
    assert (free.learning_rate, free.reproducible, free.survives) == ("lower", "hard", 7)
    assert free.overlap == pytest.approx(7, rel=0.05)
    assert not plain.balanced_data
    assert free.balanced_data
    assert plain.exposure is not None
    assert free.exposure is not None
    assert plain.exposure > free.exposure


def test_better_links_never_make_the_best_worth_less() -> None:
    speedups = []
    for mbit in (0.1, 1, 10, 100, 1000, 10000):
        predicted = outlook(f"{mbit}mbit")
        speedups.append(value(advise(predicted).choice, predicted, ()))
    assert speedups == sorted(speedups)


def test_dropping_without_feedback_is_never_advised() -> None:
    bare, fed = "all_reduce(codec=topk)", "all_reduce(codec=topk, feedback=residual)"
    predicted = plan(TASK, cluster("20mbit"), strategies=(bare, fed, "all_reduce", "all_reduce(codec=half)"))
    advice = advise(predicted)
    assert dict(advice.excluded)[bare] == DROPS
    assert {fed, "all_reduce(codec=half)"}.isdisjoint(dict(advice.excluded))
    assert any("error feedback" in said for said in departures(predicted.named(bare), predicted.site))
    assert not any("error feedback" in said for said in departures(predicted.named(fed), predicted.site))


def test_doubts_are_paid_for() -> None:
    predicted = outlook("100gbit")
    plain, packed = (predicted.named(name) for name in ("all_reduce", "all_reduce(codec=topk, feedback=residual)"))
    assert predicted.relative_samples(packed) >= 1.1 * predicted.relative_samples(plain)
    assert predicted.relative_samples(predicted.alone) == 1


def test_only_what_was_measured_to_cost_samples_is_paid_for() -> None:
    """Half precision, and one model whose slices or replicas lie on the workers, needed no more samples."""
    exact, free = needed("all_reduce", "1gbit"), needed("ps(consistency=asynchronous)", "1gbit")
    assert needed("all_reduce(codec=half)", "1gbit") == pytest.approx(exact, rel=1e-6)
    assert needed("all_reduce(codec=topk, feedback=residual)", "1gbit") > 1.1 * exact
    assert 0.8 * free < needed("slice_servers", "1gbit") < 0.95 * free  # slices are read a little later than a model
    assert needed("local_sgd(period=1)", "100gbit") == pytest.approx(exact, rel=0.01)


def needed(text: str, bandwidth: str, task: JobProfile = TASK, workers: int = 8) -> float:
    site = Site(task, cluster(bandwidth, "constant(0.1)"))
    return relative_samples(predict_step(Strategy.parse(text), site, workers), site)


def test_free_running_messages_are_late_without_bound_where_links_are_full() -> None:
    free, busy, full = (needed("broadcast", f"{mbit}mbit") for mbit in (100_000, 4_000, 1_000))
    assert free < busy < 10 * free
    assert full > 1000 * free
    assert needed("ps", "1gbit") == needed("ps", "100gbit")


def test_momentum_lets_workers_meet_more_seldom_and_hear_less_late() -> None:
    heavy = dataclasses.replace(TASK, optimizer=SGD(lr=0.1, momentum=0.9))
    rare, late, plain = "local_sgd(period=8)", "ps(consistency=asynchronous)", "all_reduce"
    assert needed(rare, "1gbit", heavy) < needed(rare, "1gbit")
    assert needed(late, "1gbit", heavy) > needed(late, "1gbit")
    assert needed(plain, "1gbit", heavy) == needed(plain, "1gbit")


def test_a_large_batch_is_worth_what_theory_says() -> None:
    for workers in (2, 8):
        assert needed("all_reduce", "1gbit", workers=workers) == pytest.approx((workers + NOISE) / (1 + NOISE))
    late = 1 / math.sin(math.pi / 30)  # of seven versions
    assert needed("ps(consistency=asynchronous)", "1gbit") == pytest.approx(
        DOUBT * (late + NOISE) / (1 + NOISE), rel=0.05
    )


CASES = Path(__file__).parents[2] / "benchmarks" / "advice.py"


@lru_cache
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("advice_cases", CASES)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


COMPARED = (
    "all_reduce",
    "ps(consistency=asynchronous)",
    "local_sgd(period=8)",
    "local_sgd(period=32)",
    FED,
    "powersgd(rank=1)",
    "dpsgd",
    "gossip",
    "easgd",
)
"""Of each kind that an answer may be, one or two that are hard to beat; one worker is always among them."""


def advised(
    name: str,
    compute: str | None = None,
    bandwidth: str | None = None,
    requirements: bool = True,
    strategies: tuple[str, ...] = COMPARED,
) -> Advice:
    """What is advised in a case of the benchmark, perhaps with another law of compute times or other links."""
    case = next(one for one in benchmark().cases() if one.name == name)
    text = case.cluster
    if compute is not None:
        text = re.sub(r"compute = .*", f'compute = "{compute}"', text)
    if bandwidth is not None:
        text = re.sub(r"bandwidth = .*", f'bandwidth = "{bandwidth}"', text)
    found = plan(case.task, read_cluster(text, name=name), strategies=strategies)
    return advise(found, case.requirements if requirements else ())


def one_worker(advice: Advice) -> bool:
    return advice.choice.strategy is None


def not_compressed(advice: Advice) -> bool:
    """Half precision is the best of equals where messages cost little."""
    strategy = advice.choice.strategy
    exact = all(one.lossless or lost(one) < DROPPING for one in codecs_of(strategy))
    return strategy is not None and strategy.traits.approximation == "none" and exact


def asynchronous(advice: Advice) -> bool:
    strategy = advice.choice.strategy
    return strategy is not None and not is_synchronous(strategy)


def synchronous(advice: Advice) -> bool:
    return advice.choice.strategy is not None and not asynchronous(advice)


def central(advice: Advice) -> bool:
    return synchronous(advice) and advice.choice.strategy is not None and is_central(advice.choice.strategy)


def sends_less(advice: Advice) -> bool:
    return advice.choice.strategy is not None and advice.choice.sent_bytes < 4 * 8970


FAMILIES = {
    "fast-network": (not_compressed, synchronous),  # a model takes 29 us, a gradient 100 ms
    "infiniband": (not_compressed, synchronous),  # and still less on 200 Gbit/s
    "far-apart": (not_compressed,),  # latency is paid for a byte as for a model
    "slow-compute": (not_compressed,),  # a model takes 0.3 s, a gradient 2 s, and four workers divide little noise
    "modem": (one_worker,),  # 450 gradients pass while one model does
    "one-fast": (one_worker,),  # three machines add 15 % of the gradients
    "satellite": (one_worker,),  # one message takes as long as 300 gradients
    "slow-spells": (asynchronous,),  # with a barrier everyone waits for whoever is slow
    "heavy-tail": (asynchronous,),  # the slowest of sixteen takes several times the mean
    "two-speeds": (asynchronous,),  # with a barrier the new machines are as slow as the old ones
    "volunteers": (asynchronous,),  # exponential times, and those who are left have to go on
    "by-label": (central, not_compressed),  # models apart would each know a class or two
    "by-label-slow": (central, sends_less),
    "ethernet": (sends_less,),  # a ring's two transits would take two thirds of a gradient
    "heavy-model": (sends_less,),  # a transit takes six gradients
    "repeatable": (synchronous,),  # as was asked for
    "rack": (not_compressed,),  # a model takes 0.3 ms, a gradient 100 ms
    "workshop": (not_compressed,),  # a model takes 3 ms, a gradient 500 ms
    "dial-up": (one_worker,),  # 900 gradients pass while one model is on its way
    "deep-space": (one_worker,),  # 400 gradients pass while one message is
    "preempted": (asynchronous,),  # in most steps one of twelve is slow
    "three-ages": (asynchronous,),  # with a barrier all machines are as slow as the oldest
    "memoryless": (asynchronous,),  # the slowest of sixteen takes 3.4 times the mean
    "hospitals": (central, not_compressed),  # models apart would each know a class or two, and links are fast
    "branches": (central,),
    "throttled": (asynchronous,),  # a seventh of all gradients is ten times slower
    "campus": (asynchronous,),  # with a barrier all wait for the slowest of ten, and the old ones most
    "hot-aisle": (asynchronous,),  # the slowest of twelve takes many times the mean
    "hall": (not_compressed,),  # a model takes 29 us, a gradient 100 ms
    "thin-pipes": (sends_less,),  # a transit takes three gradients
}
"""The answer that is known, as far as it is a kind of strategy; which one of a kind is simulated by the benchmark."""


REASONS = (
    "infiniband",
    "far-apart",
    "slow-compute",
    "modem",
    "one-fast",
    "satellite",
    "throttled",
    "hot-aisle",
    "two-speeds",
    "by-label",
    "by-label-slow",
    "ethernet",
    "heavy-model",
    "repeatable",
)
"""One case for each reason that an answer has; the others have the same ones elsewhere."""


def check_family(name: str, advice: Advice) -> None:
    for holds in FAMILIES[name]:
        assert holds(advice), f"{advice.choice.name} is not {holds.__name__}"


@pytest.mark.parametrize(
    "name", few(REASONS, "infiniband", "modem", "hot-aisle", "by-label-slow", "heavy-model", "repeatable")
)
def test_known_answers(name: str) -> None:
    check_family(name, advised(name))


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_known_answers_among_all_strategies(name: str) -> None:
    check_family(name, advised(name, strategies=()))


@pytest.mark.parametrize("name", few(["slow-spells", "heavy-tail", "preempted", "memoryless"], "heavy-tail"))
def test_without_stragglers_known_answers_are_others(name: str) -> None:
    assert synchronous(advised(name, compute="constant(0.1)", requirements=False))


@pytest.mark.parametrize("name", ["modem"])
def test_with_better_links_one_worker_is_not_enough(name: str) -> None:
    assert not one_worker(advised(name, bandwidth="1gbit", compute="lognormal(0.1, sigma=0.05)"))


@pytest.mark.parametrize("name", few(["fast-network", "infiniband"], "fast-network"))
def test_with_worse_links_less_is_sent(name: str) -> None:
    advice = advised(name, bandwidth="2mbit")
    assert one_worker(advice) or sends_less(advice) or approximates(advice.choice)


def test_every_kind_of_case_is_there() -> None:
    shown = [case.shows for case in benchmark().cases()]
    least = {"compression cannot pay": 3, "one machine wins": 2, "asynchrony wins": 3, "by-label data": 2}
    assert len(shown) >= 12
    assert all(shown.count(kind) >= count for kind, count in least.items())
    assert {case.name for case in benchmark().cases()} == set(FAMILIES)


def test_cases_are_drawn_by_their_seed_and_can_be_planned() -> None:
    one, again, other = (benchmark().drawn(12, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert all(read_cluster(case.cluster).workers in (4, 8, 12, 16) for case in one)


@pytest.mark.parametrize(("text", "share"), [("half", 2.0**-22 / 6), ("topk(0.01)", 0.838), ("topk(0.1)", 0.405)])
def test_what_a_codec_leaves_out_is_the_share_that_the_law_of_the_array_says(text: str, share: float) -> None:
    assert lost(Codec.parse(text)) == pytest.approx(share, rel=0.1)
    assert lost(Codec.parse("topk(0.01)")) > 1.3 * lost(Codec.parse("topk(0.1)"))
