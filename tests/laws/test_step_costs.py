"""Closed forms of a step's cost against the strategies' own programs in virtual time, and against known values."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest

from flockstep import registry
from flockstep.costs import order_statistics, utilisation
from flockstep.costs.chains import met
from flockstep.costs.steps import NoForm, Rates, Setting, StepCost, has_form, step_cost
from flockstep.errors import ConfigurationError
from flockstep.planning.rehearsal import ELEMENTS, Rehearsal, rehearse
from flockstep.simulation.compute import ComputeModel, Constant
from flockstep.simulation.network import Link
from flockstep.strategies.base import Strategy

SECONDS = 0.02
LATENCY = 1e-3
BANDWIDTHS = (1e7, 1e6)
WORKERS = (2, 4, 8, 16)
CONSTANT = f"constant({SECONDS})"

# A strategy and the largest deviation with constant times; 1e-9 is exact. Steps of the rehearsal where 40 do not do:
# a whole number of periods, long after everyone has met at the server's card at the start.
FORMS: dict[str, tuple[float, int]] = {
    "all_reduce": (1e-9, 40),
    "all_reduce(recursive_doubling)": (1e-9, 40),
    "all_reduce(rabenseifner)": (1e-9, 40),
    "all_reduce(binomial_tree)": (1e-9, 40),
    "all_reduce(codec=half)": (1e-9, 40),
    "all_reduce(recursive_doubling,codec=half)": (1e-9, 40),
    "all_reduce(codec=topk(0.01),feedback=residual)": (1e-9, 40),
    "all_reduce(codec=random_k(0.1))": (1e-3, 40),
    "bucketed(cap=0.008,first=0.004)": (1e-4, 20),
    "bucketed(cap=0.008,accumulate=2)": (1e-9, 40),
    "powersgd": (1e-9, 40),
    "scatter_reduce": (1e-9, 40),
    "scatter_reduce(codec=half)": (1e-3, 40),
    "two_way": (1e-9, 20),
    "majority_vote": (1e-9, 20),
    "ps(bsp)": (1e-9, 40),
    "ps(bsp,shards=3)": (1e-3, 40),
    "ps(bsp,codec=half)": (1e-9, 40),
    "ps(asynchronous)": (1e-9, 40),
    "ps(asynchronous,shards=2)": (1e-9, 40),
    "ps(softsync(2))": (1e-9, 40),
    "ps(k_batch_async(2))": (1e-9, 40),
    "ps(ssp(1))": (1e-9, 40),
    "ps(ssp(3))": (1e-9, 40),
    "ps(bounded_delay(2))": (1e-9, 40),
    "ps(backup(1))": (1e-9, 40),
    "ps(k_sync(2))": (1e-9, 40),
    "hierarchical(4)": (1e-9, 40),
    "hierarchical(2)": (1e-9, 40),
    "downpour": (1e-9, 40),
    "downpour(4,4)": (0.02, 160),
    "local_sgd(5)": (1e-9, 40),
    "local_sgd(10,outer=nesterov)": (1e-9, 40),
    "overlap_local_sgd(5)": (1e-9, 40),
    "streaming_diloco(10,2,3)": (1e-9, 40),
    "streaming_diloco(10,2,0)": (1e-9, 40),
    "easgd(5)": (0.02, 160),
    "eamsgd(4)": (0.02, 160),
    "easgd_sync": (1e-9, 40),
    "easgd_sync(5)": (1e-9, 40),
    "dpsgd": (1e-9, 40),
    "dpsgd(exponential)": (1e-9, 40),
    "dpsgd(complete)": (1e-9, 40),
    "sgp": (1e-9, 40),
    "sgp(tau=1)": (1e-9, 40),
    "sgp(tau=4)": (1e-9, 160),
    "sgp(directed_exponential,tau=2)": (1e-9, 80),
    "adpsgd": (0.02, 40),
    "gossip(0.5)": (1e-9, 40),
    "broadcast": (1e-9, 20),
    "partial(0.5)": (1e-9, 20),
    "gradient_coding(1)": (1e-9, 40),
    "gradient_coding(1,cyclic)": (1e-9, 40),
    "ensemble": (1e-9, 40),
}
BY_CHANCE = {"all_reduce(codec=random_k(0.1))": 5e-3, "gossip(0.5)": 0.15, "partial(0.5)": 0.2, "adpsgd": 0.05}
"""Whether a worker sends is random: bytes agree in the mean. A seed in an encoding is not added up."""
RANDOM = (
    "all_reduce",
    "all_reduce(recursive_doubling)",
    "scatter_reduce",
    "ps(bsp)",
    "ps(bsp,shards=2)",
    "ps(asynchronous)",
    "ps(softsync(2))",
    "ps(ssp(2))",
    "ps(bounded_delay(2))",
    "ps(backup(1))",
    "ps(k_sync(4))",
    "hierarchical(2)",
    "downpour(4,4)",
    "local_sgd(5)",
    "overlap_local_sgd(5)",
    "easgd(5)",
    "easgd_sync(5)",
    "dpsgd",
    "sgp",
    "sgp(tau=1)",
    "sgp(tau=4)",
    "adpsgd",
    "gossip(0.5)",
    "gradient_coding(1)",
)


def setting(workers: int, compute: str = CONSTANT, bandwidth: float = 1e7, **more: object) -> Setting:
    """The stand-in of a rehearsal, so that a byte of it is a byte."""
    known = Setting(workers, ELEMENTS, ComputeModel.parse(compute), LATENCY, bandwidth)
    return dataclasses.replace(known, **more)  # type: ignore[arg-type]


@functools.cache
def rehearsed(text: str, workers: int, compute: str, bandwidth: float, steps: int) -> Rehearsal:
    law, network = ComputeModel.parse(compute), Link(bandwidth, LATENCY)
    return rehearse(Strategy.parse(text), workers, 4 * ELEMENTS, law, network, steps=steps)


def cost(text: str, known: Setting) -> StepCost:
    return step_cost(Strategy.parse(text), known)


@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("text", FORMS)
def test_constant_times_agree_with_the_program(text: str, workers: int, bandwidth: float) -> None:
    tolerance, steps = FORMS[text]
    found, ran = cost(text, setting(workers, bandwidth=bandwidth)), rehearsed(text, workers, CONSTANT, bandwidth, steps)
    assert found.seconds == pytest.approx(ran.seconds_per_step, rel=tolerance)
    assert found.utilisation == pytest.approx(ran.utilisation, rel=max(tolerance, 1e-9))
    chance = BY_CHANCE.get(text, 1e-9)
    assert found.sent == pytest.approx(ran.sent_per_step, rel=chance)
    assert found.server_sent == pytest.approx(ran.server_sent_per_step, rel=1e-9)
    if found.messages is not None:
        assert found.messages == pytest.approx(ran.messages_per_step, rel=chance)
    if found.staleness_bound is not None and ran.staleness_max is not None:
        assert ran.staleness_max <= found.staleness_bound


@pytest.mark.parametrize("text", RANDOM)
def test_exponential_times_agree_with_the_program(text: str) -> None:
    workers, steps, law = 8, 600, f"exponential({SECONDS})"
    found, ran = cost(text, setting(workers, law)), rehearsed(text, workers, law, 1e7, steps)
    assert found.seconds == pytest.approx(ran.seconds_per_step, rel=0.05)
    assert found.sent == pytest.approx(ran.sent_per_step, rel=0.03)
    if found.staleness is not None and ran.staleness is not None:
        assert found.staleness == pytest.approx(ran.staleness, rel=0.05, abs=0.05)
    if found.staleness_bound is not None and ran.staleness_max is not None:
        assert ran.staleness_max <= found.staleness_bound


@pytest.mark.parametrize("law", ["speeds(constant(0.02),(1,2))", "shared_cores(constant(0.02),2)"])
@pytest.mark.parametrize("text", ["all_reduce", "ps(bsp)", "local_sgd(5)", "dpsgd", "easgd_sync", "scatter_reduce"])
def test_unequal_workers_and_shared_cores(text: str, law: str) -> None:
    found, ran = cost(text, setting(4, law)), rehearsed(text, 4, law, 1e7, 40)
    assert found.seconds == pytest.approx(ran.seconds_per_step, rel=0.05)


@pytest.mark.parametrize("text", ["all_reduce", "ps(bsp)", "ps(asynchronous)", "ps(ssp(2))", "gossip"])
def test_random_times_on_shared_cores(text: str) -> None:
    law = f"shared_cores(exponential({SECONDS}),2)"
    found, ran = cost(text, setting(4, law)), rehearsed(text, 4, law, 1e7, 600)
    assert found.seconds == pytest.approx(ran.seconds_per_step, rel=0.05)
    assert any("shared core" in note for note in found.notes)


@pytest.mark.parametrize("text", ["all_reduce(codec=threshold(0.001))", "ps(bsp,codec=threshold(0.001))"])
def test_encodings_whose_size_the_data_decide_are_bounded_and_noted(text: str) -> None:
    found = cost(text, setting(4))
    assert any("the data decide" in note for note in found.notes)
    assert found.sent >= rehearsed(text, 4, CONSTANT, 1e7, 20).sent_per_step


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("ps(bsp)", lambda s: SECONDS + 2 * LATENCY + 2 * s.workers * s.busy(s.nbytes)),  # answers do not overlap
        ("all_reduce", lambda s: SECONDS + (s.workers - 1) * s.message(s.nbytes / s.workers)),  # half of the ring
        ("ps(asynchronous)", lambda s: SECONDS + 2 * s.message(s.nbytes)),  # no incast
        ("dpsgd", lambda s: SECONDS + LATENCY + 2 * s.busy(s.nbytes)),  # no overlap
        ("local_sgd(5)", lambda s: SECONDS + 2 * (s.workers - 1) * s.message(s.nbytes / s.workers)),  # no period
        ("gradient_coding(1)", lambda s: SECONDS + 2 * LATENCY + s.workers * s.busy(s.nbytes)),  # one gradient
    ],
)
def test_a_form_with_a_wrong_factor_is_caught(text: str, wrong: object) -> None:
    ran = rehearsed(text, 16, CONSTANT, 1e7, 40).seconds_per_step
    assert cost(text, setting(16)).seconds == pytest.approx(ran, rel=0.02)
    assert wrong(setting(16)) != pytest.approx(ran, rel=0.02)  # type: ignore[operator]


def test_formulas_of_the_docstrings() -> None:
    """Servers: synchronous T_c + 2L + (n+k) b, asynchronous max(T_c + 2L + (k+1) b, n b)."""
    for workers, shards, bandwidth in itertools.product(WORKERS, (1, 2, 4), BANDWIDTHS):
        known = setting(workers, bandwidth=bandwidth)
        b = known.busy(known.nbytes / shards)
        sync = SECONDS + 2 * LATENCY + (workers + shards) * b
        assert cost(f"ps(bsp,shards={shards})", known).seconds == pytest.approx(sync)
        free = max(SECONDS + 2 * LATENCY + (shards + 1) * b, workers * b)
        assert cost(f"ps(asynchronous,shards={shards})", known).seconds == pytest.approx(free)


def test_utilisation_of_periodic_averaging() -> None:
    """C17: 1:5 is 83.3 %, and the period that gives it."""
    assert utilisation.periodic(5, 1.0, 1.0) == pytest.approx(0.8333, abs=5e-5)
    for workers, bandwidth in itertools.product(WORKERS, BANDWIDTHS):
        known = setting(workers, bandwidth=bandwidth)
        communication = 2 * (workers - 1) * known.message(known.nbytes / workers)
        period = utilisation.whole_period_for(utilisation.ONE_TO_FIVE, SECONDS, communication)
        found = cost(f"local_sgd({period})", known).utilisation
        assert found == pytest.approx(utilisation.periodic(period, SECONDS, communication))
        assert found >= utilisation.ONE_TO_FIVE
        assert period == 1 or cost(f"local_sgd({period - 1})", known).utilisation < utilisation.ONE_TO_FIVE
    with pytest.raises(ConfigurationError, match="utilisation in"):
        utilisation.period_for(1.0, 1.0, 1.0)


def test_buckets_one_after_the_other_never_take_less() -> None:
    known = setting(8, bandwidth=1e6)
    parts = 4
    ready = [SECONDS * (1 / 3 + 2 / 3 * (i + 1) / parts) for i in range(parts)]
    each = 14 * known.message(known.nbytes / parts / 8)
    most = utilisation.bucketed(ready, [each] * parts)
    found = cost("bucketed(cap=0.008192,first=0.008192)", known).seconds
    assert max(ready[-1] + each, SECONDS) <= found <= most + 1e-12


def test_codec_and_optimiser_rates_add_up() -> None:
    rates = Rates(encode=1e6, decode=2e6, optimizer=4e6, reduce=8e6)
    free_of_charge, charged = setting(4), setting(4, rates=rates)
    plain = cost("all_reduce", charged).seconds - cost("all_reduce", free_of_charge).seconds
    assert plain == pytest.approx(ELEMENTS / 4e6 + 0.75 * ELEMENTS / 8e6)
    coded = cost("all_reduce(codec=half)", charged).seconds - cost("all_reduce(codec=half)", free_of_charge).seconds
    assert coded == pytest.approx(ELEMENTS / 1e6 + 4 * ELEMENTS / 2e6 + ELEMENTS / 4e6)
    with pytest.raises(ConfigurationError, match="encode"):
        Rates(encode=0)


def test_memory_counts_what_is_kept() -> None:
    model = 4 * ELEMENTS
    assert cost("ensemble", setting(4)).memory == 2 * model
    assert cost("ensemble", setting(4, slots=2)).memory == 4 * model
    assert cost("ps(bsp)", setting(4, slots=2)).memory == 3 * model  # the server keeps the optimiser's
    kept = [cost(text, setting(4)).memory for text in ("local_sgd(5)", "local_sgd(5,outer=nesterov)")]
    assert kept[1] - kept[0] == 2 * model
    quarter = cost("scatter_reduce", setting(4, slots=1)).memory - cost("scatter_reduce", setting(4)).memory
    assert quarter == model / 4


def test_what_has_no_form_says_so() -> None:
    for text in (
        "ps(value_bound)",
        "ps(k_batch_sync(2))",
        "ps(essp)",
        "local_sgd(adaptive)",
        "hogwild",
        "factor_server",
    ):
        with pytest.raises(NoForm, match="rehearse it"):
            cost(text, setting(4))
    assert not has_form(Strategy.parse("hogwild"))
    with pytest.raises(ConfigurationError):
        cost("gradient_coding(3)", setting(2))
    with pytest.raises(ConfigurationError, match="tensors must hold"):
        setting(2, tensors=((3,),))


def test_every_strategy_has_a_form_or_says_why_not() -> None:
    for name in registry.names("strategy"):
        strategy = Strategy.parse(name)
        try:
            found = step_cost(strategy, setting(4))
        except ConfigurationError:
            continue
        assert found.seconds > 0
        assert 0 < found.utilisation <= 1


def test_saturated_links_are_noted() -> None:
    assert any("queue without bound" in note for note in cost("broadcast", setting(16)).notes)
    assert not any("queue without bound" in note for note in cost("gossip(0.1)", setting(16)).notes)


def test_meetings_of_late_workers_take_at_most_the_sum() -> None:
    known = setting(8, f"exponential({SECONDS})")
    most = order_statistics.slowest(known.compute, 8) + 14 * known.message(known.nbytes / 8)
    assert met(known, 14 * known.message(known.nbytes / 8), None) == pytest.approx(most)
    assert cost("all_reduce", known).seconds < most


def test_large_clusters_are_quick_enough_to_have_a_form() -> None:
    known = setting(1024)
    for text in ("all_reduce", "ps(bsp)", "ps(asynchronous)", "local_sgd(10)", "scatter_reduce", "easgd(10)"):
        assert cost(text, known).seconds >= SECONDS


FREE = ("ensemble", "gossip", "ps(consistency=asynchronous)", "easgd", "eamsgd", "deepspark", "downpour", "adpsgd")


@pytest.mark.parametrize("text", FREE)
def test_who_waits_for_nobody_counts_at_its_own_speed(text: str) -> None:
    law = ComputeModel.parse("speeds(constant(0.1), (1, 4))")
    cost = step_cost(Strategy.parse(text), Setting(8, 1000, law, 1e-6, 1e10))
    assert cost.samples_per_second == pytest.approx(4 / 0.1 + 4 / 0.4, rel=0.02)
    assert cost.seconds == pytest.approx((0.1 + 0.4) / 2, rel=0.02), "a step of a worker, in the mean"


@pytest.mark.parametrize("text", ["adpsgd", "gossip", "ensemble", "ps(consistency=asynchronous)"])
def test_nothing_computes_more_than_its_cores(text: str) -> None:
    law = ComputeModel.parse("shared_cores(constant(0.1), cores=2)")
    cost = step_cost(Strategy.parse(text), Setting(4, 1000, law, 1e-6, 1e10))
    assert cost.samples_per_second <= 2 / 0.1 * (1 + 1e-9)


@pytest.mark.parametrize("collective", ["ring", "recursive_doubling", "rabenseifner"])
def test_with_two_speeds_the_rounds_are_followed(collective: str) -> None:
    law, link = ComputeModel.parse("speeds(constant(0.1), (1, 2))"), Link(1e7, 1e-3)
    strategy = Strategy.parse(f"all_reduce(collective={collective})")
    cost = step_cost(strategy, Setting(4, 100_000, law, 1e-3, 1e7))
    found = rehearse(strategy, 4, 400_000, law, link, steps=40)
    assert cost.seconds == pytest.approx(found.seconds_per_step, rel=0.01)
    assert not cost.notes


@pytest.mark.parametrize("collective", ["recursive_doubling", "rabenseifner", "binomial_tree"])
def test_what_folds_is_said_to_be_rough(collective: str) -> None:
    cost = step_cost(Strategy.parse(f"all_reduce(collective={collective})"), Setting(5, 1000, Constant(0.1), 1e-3, 1e7))
    assert any("as if the collective began when the last worker is there" in note for note in cost.notes)
