"""Every gradient counts the same, whenever it is released and together with however many: bowls, sums, the record."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest

from flockstep.frameworks.torch_groups import TorchOptimizer
from flockstep.records.config import RunConfig
from flockstep.records.events import UpdateEvent
from flockstep.records.summary import GradientWeight, summarize
from flockstep.registry import names
from flockstep.strategies.consistency import StaleSynchronous
from flockstep.strategies.consistency.base import ConsistencyView, Push
from flockstep.strategies.consistency.first_of import BackupWorkers
from flockstep.strategies.consistency.k_async import KAsync
from flockstep.strategies.server_updates.plain import Plain
from flockstep.testing.strategies import GradientSource, run_strategy, small_job
from support.benchmarks import benchmark
from support.matrix import few

BOWLS = benchmark("bowls")
bowl = BOWLS.bowl

BOUNDED = {
    "bsp": "bsp",
    "ssp": "ssp(2)",
    "cached_ssp": "cached_ssp(2)",
    "essp": "essp(2)",
    "bounded_delay": "bounded_delay(2)",
}
"""Rules that bound how far clocks part: in the long run every worker gives as many gradients as any other."""
FREE = {
    "value_bound": "value_bound(0.1)",
    "backup": "backup(1)",
    "k_sync": "k_sync(2)",
    "k_batch_sync": "k_batch_sync(3)",
    "k_async": "k_async(2)",
    "k_batch_async": "k_batch_async(3)",
    "softsync": "softsync(2)",
    "asynchronous": "asynchronous",
}
OF_ALL = ["bsp", "ssp(2)", "cached_ssp(2)", "essp(2)", "bounded_delay(0)", "bounded_delay(1)", "bounded_delay(2)"]
"""Rules under which one gradient of every worker makes a step."""
WEIGHTS = {
    **dict.fromkeys(OF_ALL, 1 / 4),
    **dict.fromkeys(["ssp(2, weight=sum)", "cached_ssp(2, weight=sum)", "essp(2, weight=sum)"], 1.0),
    **dict.fromkeys(["bounded_delay(2, weight=sum)", "value_bound(0.1)", "asynchronous"], 1.0),
    **dict.fromkeys(["backup(1)", "k_batch_sync(3)", "k_batch_async(3)"], 1 / 3),
    **dict.fromkeys(["k_sync(2)", "k_async(2)", "softsync(2)"], 1 / 2),
}
"""Each gradient's weight with 4 workers, in learning rates: what the papers' formulas divide by."""
settled = cache(bowl)


laws = pytest.mark.parametrize("law", BOWLS.LAWS)
stragglers = pytest.mark.parametrize("straggler", BOWLS.STRAGGLERS)


def test_every_rule_is_tried():
    assert {*BOUNDED, *FREE} == set(names("consistency"))


@laws
@stragglers
@pytest.mark.parametrize("rule", BOUNDED.values())
def test_where_clocks_stay_together_stragglers_count_as_much_as_others(rule, law, straggler):
    """The mean of the optima, 0.25, whoever is slow: 0.34 to 0.50 where a gradient that comes alone counts fully."""
    assert settled(f"ps({rule})", law, straggler).mean == pytest.approx(np.mean(BOWLS.OPTIMA), abs=0.02)


@pytest.mark.parametrize("optimizer", ["sgd(lr=0.003, momentum=0.9)", "sgd(lr=0.003, momentum=0.9, nesterov=True)"])
@pytest.mark.parametrize("rule", ["ssp(2)", "essp(2)", "cached_ssp(2)", "ssp(2, weight=sum)"])
def test_momentum_on_the_server_does_not_change_what_a_gradient_counts(rule, optimizer):
    """Each moves the parameter by eta / f / (1 - mu) of itself in the end, whatever is released with it."""
    assert bowl(f"ps({rule})", straggler="last", optimizer=optimizer).mean == pytest.approx(0.25, abs=0.02)


ADAPTIVE = ["adam(lr=0.003)", "adamw(lr=0.003, weight_decay=0)", "adam(lr=0.003, beta1=0)"]


@pytest.mark.parametrize("optimizer", ADAPTIVE)
@pytest.mark.parametrize("rule", ["ssp(2)", "essp(2)"])
def test_a_running_mean_does_not_change_what_a_gradient_counts(rule, optimizer):
    """0.45 where a gradient enters Adam's mean fully whatever share of a step it stands for; 0.25 is the truth."""
    found = bowl(f"ps({rule})", straggler="last", steps=600, optimizer=optimizer)
    assert found.mean == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize(
    ("kind", "group"), few([("Adam", {}), ("NAdam", {}), ("RMSprop", {"momentum": 0.9})], ("NAdam", {}))
)
def test_torchs_classes_on_servers_do_not_change_what_a_gradient_counts(kind, group):
    pytest.importorskip("torch")
    optimizer = TorchOptimizer(kind, json.dumps([group]), lr=0.0005 if group else 0.003)
    found = bowl("ps(ssp(2))", straggler="last", steps=600, optimizer=str(optimizer))
    assert found.mean == pytest.approx(0.25, abs=0.02)


@laws
@stragglers
@pytest.mark.parametrize("rule", WEIGHTS)
def test_the_weight_of_every_gradient_is_on_the_record_and_the_same_for_all(rule, law, straggler):
    weights = settled(f"ps({rule})", law, straggler).weights
    assert {round(weight, 12) for each in weights.values() for weight in each} == {round(WEIGHTS[rule], 12)}


@pytest.mark.parametrize("rule", ["ssp", "essp", "cached_ssp"])
def test_the_bowls_notice_a_gradient_that_counts_fully_when_it_comes_alone(rule, monkeypatch):
    """Negative control: the mean of each group as one full step."""
    apply = Plain.apply
    monkeypatch.setattr(Plain, "apply", lambda rule, me, state, group, share=1.0: apply(rule, me, state, group, 1.0))
    assert abs(bowl(f"ps({rule}(2))", straggler="last").mean - 0.25) > 0.1


LOSES = {"backup(1)", "k_sync(2)", "k_batch_sync(3)"}
"""Rules that drop gradients."""


@pytest.mark.parametrize("workers", [4, 5])
@pytest.mark.parametrize("rule", [rule for rule in WEIGHTS if rule not in LOSES])
def test_one_gradient_of_each_worker_moves_the_parameters_by_their_weighted_sum(rule, workers):
    """w_0 - eta / m sum_i g_i(w_0) after one step, with what is left at the end: 5 workers, groups of 2 or 3."""
    job = small_job(dtype="float64")
    run = run_strategy(f"ps({rule})", workers, 1, job=job, network="ideal")
    source = GradientSource(workers, job)
    start = source.start()
    full = workers if rule in OF_ALL else 1 / WEIGHTS[rule]
    total = sum(source.gradient(rank, start) for rank in range(workers))
    np.testing.assert_allclose(run.server, start - 0.1 / full * total, rtol=0, atol=1e-14)


@pytest.mark.parametrize("workers", [5, 7])
@pytest.mark.parametrize("leaf", ["synchronous", "asynchronous"])
def test_leaves_of_different_size_do_not_change_what_a_gradient_counts(workers, leaf):
    """Two leaves, of 3 and 2 or of 4 and 3 workers, whose sums the root applies one by one."""
    job = small_job(dtype="float64")
    run = run_strategy(f"hierarchical(4, leaf={leaf}, root=asynchronous)", workers, 1, job=job, network="ideal")
    source = GradientSource(workers, job)
    start = source.start()
    largest = -(-workers // 2)
    total = sum(source.gradient(rank, start) for rank in range(workers))
    np.testing.assert_allclose(run.result, start - 0.1 / largest * total, rtol=0, atol=1e-14)
    assert {round(update.weight, 12) for update in run.of(UpdateEvent) if update.weight} == {round(1 / largest, 12)}


def view(**changes):
    values = {"slowest": 0, "workers": 4, "live": 4, "lost": 0, "version": 0, "reading": {}}
    memory = {"params": np.zeros(1), "kept": {}, "moved": True}
    return ConsistencyView(**{**values, **memory, **changes}, waiting=lambda rank: False)


def pushes(count, version=0):
    return [Push(rank, 0, version, 0.1, np.zeros(1)) for rank in range(count)]


def test_toward_the_end_as_many_gradients_make_a_step_as_workers_are_left():
    """A step of backup(1) with 4 workers takes 3; where two have ended it takes the 2 that can still come."""
    rule = BackupWorkers(1)
    two = pushes(2)
    assert rule.released(two, view(live=2)) == [two]
    assert rule.released(pushes(1), view(live=2)) == []
    assert rule.released(pushes(2), view(live=3)) == []
    assert rule.full_step(4) == 3, "a gradient counts as 1/3 of a step to the end"
    assert KAsync(3).full_step(4) == 3


@pytest.mark.parametrize(
    ("rule", "weight", "rate"),
    [("bsp", 1 / 4, 1.0), ("ssp(2)", 1 / 4, 1.0), ("ssp(2, weight=sum)", 1.0, 4.0), ("softsync(2)", 1 / 2, 2.0)],
)
def test_the_summary_says_what_gradients_counted(rule, weight, rate):
    for shards in (1, 2):
        run = run_strategy(f"ps({rule}, shards={shards})", 4, 6)
        summary = summarize(RunConfig(kind="simulate", job="x", strategy="x", workers=4), run.events, "finished")
        assert {worker.gradient_weight for worker in summary.per_worker} == {
            GradientWeight(6 * shards, weight, weight, weight)
        }
        assert summary.effective_rate == pytest.approx(rate)
    nothing = run_strategy("all_reduce", 4, 6)
    summary = summarize(RunConfig(kind="simulate", job="x", strategy="x", workers=4), nothing.events, "finished")
    assert (summary.effective_rate, summary.per_worker[0].gradient_weight) == (None, None)


def test_a_rule_that_counts_stale_gradients_less_says_so():
    """1 / tau for each gradient (Zhang et al. 2016), on the record too."""
    run = run_strategy("ps(asynchronous, server_update=staleness_scaled)", 4, 15)
    assert all(update.weight == 1 / max(1, update.staleness) for update in run.of(UpdateEvent))
    assert len({update.weight for update in run.of(UpdateEvent)}) > 2


def test_the_dead_do_not_change_what_the_others_count():
    run = run_strategy("ps(ssp(2))", 4, 30, faults=["dies(1, 0.3)"])
    assert {update.weight for update in run.of(UpdateEvent)} == {1 / 4}
    assert StaleSynchronous(2).full_step(4) == 4
