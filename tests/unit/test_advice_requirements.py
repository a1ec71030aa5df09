"""What needs rule out: where data lie, whether they differ, how many deaths are survived while the run lasts."""

from __future__ import annotations

import math

import pytest

from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_file import load_cluster, read_cluster
from flockstep.planning.advice import advise, value
from flockstep.planning.criteria import criteria
from flockstep.planning.job_profile import JobProfile, task_of
from flockstep.planning.plan import Outlook, plan
from flockstep.planning.step_prediction import ALONE
from flockstep.planning.worker_losses import RISK, deaths, length, risk, sentence
from support.clusters import equal_machines

TASK = JobProfile("surrogate", 1_000_000, ((1000, 1000),))


def cluster(bandwidth: str, count: int = 8, more: str = "") -> ClusterShape:
    """A cluster of equal machines."""
    return equal_machines(bandwidth, "constant(0.02)", count, more)


KEEPING = "local_sgd(period=32)", "streaming_diloco", "gossip", "sgp", "dpsgd", "easgd", "all_reduce", "ps"
"""Strategies whose workers compute on samples of their own alone and send parameters or gradients of them."""


def test_private_data_rule_out_what_computes_on_samples_of_others_and_nothing_else() -> None:
    """By the papers: codes replicate blocks (Tandon et al. 2017), Sandblaster hands portions to whoever is free (Dean
    et al. 2012), a first layer's factors are its inputs (Xie et al. 2016); local steps are made for private data
    (McMahan et al. 2017)."""
    named = (*KEEPING, "gradient_coding", "gradient_coding(s=0)", "sandblaster")
    predicted = plan(task_of("softmax"), cluster("1gbit", count=4), strategies=named)
    out = dict(advise(predicted, ("private",)).excluded)
    assert set(out) == {ALONE, "gradient_coding", "sandblaster"}
    assert out["gradient_coding"] == "workers compute on samples of other workers"
    assert advise(predicted, ("private",)).choice.strategy.traits.samples == "own"
    apart = dict(advise(predicted, ("unbalanced",)).excluded)
    assert {"local_sgd(period=32)", "gossip", "easgd"} < set(apart)
    assert not {"gradient_coding", "all_reduce", ALONE} & set(apart)
    assert apart["sandblaster"].startswith("steps follow the curvature")


def test_one_worker_that_is_ruled_out_but_quicker_is_told_first() -> None:
    """Ten times the samples of one worker are no reason where they are worth less than its own."""
    predicted = plan(task_of("digits"), load_cluster("edge"), strategies=("gossip",))
    advice = advise(predicted, ("private",))
    assert advice.choice is not None
    assert advice.choice.samples_per_second > 8 * predicted.alone.samples_per_second
    speedup = advice.speedups["gossip"]
    assert 0.5 < speedup < 1
    told = (
        f"One worker is predicted to need only {100 * speedup:.0f} % of the time, but is ruled out: the data are on "
        "other machines. With this requirement, use gossip on 16 workers: it processes 10 times as many samples per "
    )
    assert advice.sentences[0].startswith(told)
    assert advice.sentences[0].endswith("but is assumed to need 14 times as many samples for the same accuracy.")
    quick = plan(TASK, cluster("100gbit"), strategies=("all_reduce",))
    for requirements in ((), ("private",)):
        fast = advise(quick, requirements)
        assert fast.speedups["all_reduce"] > 2
        assert fast.sentences[0].startswith(
            "Use all_reduce on 8 workers. It is predicted to train 2.7 times as fast as one worker: it processes "
        )


def test_factors_of_the_first_layer_are_samples() -> None:
    predicted = plan(task_of("digits", 2), cluster("1gbit", count=4), strategies=("factor_server",))
    out = dict(advise(predicted, ("private",)).excluded)
    assert "training samples" in out["factor_server(consistency=asynchronous)"]


def test_unbalanced_data_rule_out_what_drops_slow_workers() -> None:
    predicted = plan(TASK, cluster("1gbit"), strategies=("ps(consistency=backup(1))", "ps"))
    out = dict(advise(predicted, ("unbalanced",)).excluded)
    assert "slow workers" in out["ps(consistency=backup(b=1))"]
    assert "ps(consistency=bsp)" not in out


def test_unbalanced_data_allow_one_model_without_waiting_whose_fast_workers_count_less() -> None:
    """Workers at speeds 1 and 1/4 take 1.6 and 0.4 of their shares of the steps: with importance weights the variance
    is (1/1.6 + 1/0.4) / 2 times as large."""
    names = "ps(consistency=asynchronous)", "slice_servers", "ps", "local_sgd"
    more = "speed = 1.0\n[nodes.slow]\ncount = 4\nspeed = 0.25"
    text = f'compute = "constant(0.02)"\n[nodes.fast]\ncount = 4\n{more}\n[[links]]\ninside = ["fast", "slow"]\n'
    uneven = read_cluster(text + 'bandwidth = "100gbit"\nlatency = "1us"\n', name="uneven")
    predicted = plan(JobProfile("small", 100), uneven, strategies=names)
    out = dict(advise(predicted, ("unbalanced",)).excluded)
    assert set(out) == {"local_sgd"}
    for one in predicted.predictions:
        waits = one.name not in names[:2]
        factor = value(one, predicted, ()) / value(one, predicted, ("unbalanced",))
        assert factor == pytest.approx(1 if waits else (1 / 1.6 + 1 / 0.4) / 2, rel=0.03)


FAILING = ("gradient_coding", "ps(consistency=backup(b=1))", "ps(consistency=asynchronous)", "ps")


def failing(rate: str, hours: float | None) -> Outlook:
    """A cluster of sixteen machines with the given failure rate."""
    shape = cluster("1gbit", count=16, more=f'failures = "{rate}"\ncomes_and_goes = true')
    length = None if hours is None else 3600 * hours
    return plan(TASK, shape, strategies=FAILING, length=length)


def test_a_second_death_ends_what_survives_one() -> None:
    """P(more than one of 16 dies) by the binomial distribution, p = 1 - exp(-rate T)."""
    for rate, hours, allowed in (("2.3/day", 24.0, False), ("2.3/day", 0.2, True), ("0.01/day", 24.0, True)):
        predicted = failing(rate, hours)
        p = -math.expm1(-float(rate.removesuffix("/day")) * hours / 24)
        fails = 1 - (1 - p) ** 16 - 16 * p * (1 - p) ** 15
        out = dict(advise(predicted, ("elastic",)).excluded)
        for name in ("gradient_coding", "ps(consistency=backup(b=1))"):
            assert risk(predicted.named(name), predicted) == pytest.approx(fails, rel=1e-9)
            assert (name not in out) == allowed
            assert allowed or "survives the loss of 1 worker: " in out[name]
        assert "ps(consistency=bsp)" in out
        assert ("ps(consistency=asynchronous)" in out) == (p**16 > RISK)


def test_how_long_the_run_takes_is_reckoned_with() -> None:
    lasting = plan(task_of("softmax"), cluster("1gbit", more='failures = "1/day"'), strategies=("ps",))
    found = lasting.named("ps(consistency=bsp)")
    assert lasting.steps == lasting.task.steps(8) > 1
    assert length(found, lasting) == lasting.steps * found.seconds
    assert length(failing("1/day", None).named("gradient_coding"), failing("1/day", None)) == 86400
    daily = failing("2.3/day", 24.0)
    said = sentence(daily.named("gradient_coding"), daily)
    assert said.startswith(
        "In a run of 24.0 h, 14 of 16 workers are expected to fail, and no new worker can join; gradient_coding"
    )
    assert said.endswith("gradient_coding survives the loss of 1 worker, so 99.9 % of runs end early.")


def test_fewer_deaths_than_one_are_told_as_a_share_of_runs() -> None:
    for hours, told in (
        (0.001, "one run in 700 loses a worker"),
        (0.1, "14 % of runs lose a worker"),
        (1e-10, "hardly any run loses a worker"),
    ):
        seldom = failing("2.3/day", hours)
        said = sentence(seldom.named("ps(consistency=asynchronous)"), seldom)
        assert f", fewer than one of 16 workers is expected to fail ({told}), and" in said
        assert "e-" not in said


def test_machines_take_their_workers_along() -> None:
    """Two machines of two workers: none, two or four of them die."""
    text = (
        'compute = "constant(0.02)"\n[nodes.m]\ncount = 2\nworkers = 2\nfailures = "1/day"\n'
        '[[links]]\ninside = "m"\nbandwidth = "1gbit"\n[[links]]\nnode = "m"\nbandwidth = "10gbit"\n'
    )
    both = plan(TASK, read_cluster(text, name="test"), strategies=("ps",), length=86400.0)
    p = -math.expm1(-1.0)
    predicted = deaths(both.named("ps(consistency=bsp)"), both)
    assert predicted == pytest.approx([(1 - p) ** 2, 0, 2 * p * (1 - p), 0, p**2])


def test_where_nobody_says_how_often_machines_fail_any_number_has_to_be_survived() -> None:
    silent = plan(TASK, cluster("1gbit"), strategies=("easgd", "gradient_coding"))
    out = dict(advise(silent, ("elastic",)).excluded)
    assert "does not say how often machines fail" in out["gradient_coding"]
    assert "easgd" not in out


def test_where_machines_state_how_often_they_fail_the_risk_alone_rules_out() -> None:
    """Plain servers survive no death, backup(1) one: P(more die) of eight machines, by the binomial distribution."""
    for hours, out in ((0.1, set()), (2.0, {"ps(consistency=bsp)"})):
        shape = cluster("1gbit", more='failures = "0.2/day"\ncomes_and_goes = true')
        named = ("ps", "ps(consistency=backup(1))", "ps(consistency=asynchronous)")
        predicted = plan(TASK, shape, strategies=named, length=3600 * hours)
        p = -math.expm1(-0.2 * hours / 24)
        none, one = 1 - (1 - p) ** 8, 1 - (1 - p) ** 8 - 8 * p * (1 - p) ** 7
        likely = {"ps(consistency=bsp)": none, "ps(consistency=backup(b=1))": one}
        for name, chance in likely.items():
            assert risk(predicted.named(name), predicted) == pytest.approx(chance, rel=1e-9)
        excluded = dict(advise(predicted, ("elastic",)).excluded)
        ruled_out = set(excluded) & {*likely, "ps(consistency=asynchronous)"}
        assert ruled_out == {name for name, chance in likely.items() if chance > RISK} == out
        assert all(
            excluded[name].startswith("a run stops when a worker is lost: 12 % of runs of 2.00 h") for name in out
        )


@pytest.mark.parametrize("rule", ["backup(b=1)", "k_sync(k=2)", "k_batch_sync(k=2)"])
def test_what_arrival_decides_is_not_reproducible(rule: str) -> None:
    """Whose gradient is given up differs from run to run with the order in which they arrive (Chen et al. 2016)."""
    name = f"ps(consistency={rule})"
    predicted = plan(TASK, cluster("1gbit"), strategies=(name, "ps", "local_sgd", "dpsgd", "sgp"))
    out = dict(advise(predicted, ("reproducible",)).excluded)
    assert out[name] == "the order of arrival decides whose gradients are dropped"
    assert not {"ps(consistency=bsp)", "dpsgd", "sgp"} & set(out)
    assert criteria(predicted.named(name), predicted.site).reproducible == "hard"
    assert criteria(predicted.named("ps(consistency=bsp)"), predicted.site).reproducible == "easy"
