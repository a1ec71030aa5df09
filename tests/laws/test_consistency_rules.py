"""What each consistency rule promises: about time, staleness, values and the dead."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.errors import CompositionError, ConfigurationError, PeerLost
from flockstep.messages import MASTER
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.base import Strategy
from flockstep.strategies.consistency import Asynchronous, Consistency
from flockstep.strategies.consistency.bounded_delay import BoundedDelay
from flockstep.strategies.consistency.first_of import BackupWorkers, KSync
from flockstep.strategies.consistency.k_async import KAsync, KBatchAsync
from flockstep.strategies.consistency.softsync import SoftSync
from flockstep.strategies.consistency.stale_synchronous import EagerStaleSynchronous
from flockstep.strategies.consistency.value_bound import ValueBound
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.testing.strategies import COMPUTE, Sent, equal_bits, run_strategy
from support.matrix import few

STEPS = 15
STRAGGLER = "speeds(exponential(0.05), (1, 1, 2, 8))"


@pytest.mark.parametrize("seed", range(3))
def test_what_is_sent_eagerly_is_fresher_than_what_is_asked_for(seed):
    """On identical draws (Dai et al. 2015), where the bound leaves room; a read with every push is fresher still.

    With a small bound and gradients of very different length the slowest decides, and there is no order.
    """
    stale = {}
    for rule in ("cached_ssp", "essp", "ssp"):
        run = run_strategy(f"ps({rule}(8))", 8, 60, compute="normal(0.05, cv=0.1)", network="1gbit", seed=seed)
        stale[rule] = np.mean([update.staleness for update in run.of(UpdateEvent)])
    assert stale["ssp"] < stale["essp"] < stale["cached_ssp"]


def test_a_cache_spares_reads():
    asked, always = (run_strategy(f"ps({rule}(8))", 4, 40) for rule in ("cached_ssp", "ssp"))
    reads = [entry for entry in asked.sent("read") if not entry.message.reply_to]
    assert 0 < len(reads) < 0.6 * 4 * 40
    assert asked.totals[MASTER].sent_bytes < 0.6 * always.totals[MASTER].sent_bytes
    assert asked.totals[MASTER].received_bytes == always.totals[MASTER].received_bytes


def order_statistics(n, k, steps, compute=COMPUTE):
    """When each of `steps` rounds is over if all n start it together and the k-th fastest ends it."""
    streams = [ComputeModel.parse(compute).stream(0, rank) for rank in range(n)]
    now, ends = 0.0, []
    for _ in range(steps):
        now = sorted(now + next(stream) for stream in streams)[k - 1]
        ends.append(now)
    return ends


def step_times(text, n, steps=STEPS):
    run = run_strategy(text, n, steps, network="ideal")
    times = [update.seconds for update in run.of(UpdateEvent)]
    return sorted(set(times)), run


@pytest.mark.parametrize("b", [0, 1, 3])
def test_a_step_with_backup_workers_takes_as_long_as_the_nth_fastest(b):
    times, run = step_times(f"ps(backup({b}))", 4 + b)
    assert times == order_statistics(4 + b, 4, STEPS)
    counts = [sum(update.count for update in run.of(UpdateEvent) if update.seconds == t) for t in times]
    assert counts == [4] * STEPS
    assert {update.staleness for update in run.of(UpdateEvent)} == {0}


@pytest.mark.parametrize("b", [1, 2])
def test_backups_never_make_a_step_later_on_the_same_draws(b):
    with_backup, without = step_times(f"ps(backup({b}))", 4 + b)[0], step_times("ps(bsp)", 4)[0]
    assert all(one <= other for one, other in zip(with_backup, without, strict=True))
    assert with_backup[-1] < without[-1]
    every = step_times("ps(bsp)", 4 + b)[0]
    assert not all(one <= other for one, other in zip(every, without, strict=True)), "waiting for all of them does"


def test_no_backup_and_k_of_all_are_bulk_synchronous_in_every_bit():
    one, other, k = (run_strategy(f"ps({rule})", 4, STEPS) for rule in ("bsp", "backup(0)", "k_sync(4)"))
    assert equal_bits(one.server, other.server, k.server)


def test_one_of_k_async_is_asynchronous_and_so_is_one_gradient_a_step():
    rules = ("asynchronous", "k_async(1)", "k_batch_async(1)", "softsync(4)")
    runs = [run_strategy(f"ps({rule})", 4, STEPS) for rule in rules]
    assert equal_bits(*(run.server for run in runs))
    assert runs[0].seconds == runs[-1].seconds
    assert not equal_bits(runs[0].server, run_strategy("ps(k_async(2))", 4, STEPS).server)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_of_k_async_takes_k_learners_and_none_of_them_twice(seed):
    sources = [update.source for update in run_strategy("ps(k_async(3))", 4, STEPS, seed=seed).of(UpdateEvent)]
    steps = [sources[i : i + 3] for i in range(0, len(sources), 3)]
    whole = [step for i, step in enumerate(steps) if all(sources[: 3 * i].count(rank) < STEPS - 1 for rank in range(4))]
    assert len(whole) > STEPS // 2
    assert all(len(set(step)) == 3 for step in whole)


def test_a_dropped_workers_next_gradient_is_of_the_newest_version():
    run = run_strategy("ps(backup(1))", 4, STEPS, compute=STRAGGLER, network="1gbit")
    versions = [entry.message.note.version for entry in run.sent("push", source=3)]
    assert versions == sorted(versions)
    taken = max(event.step for event in run.of(StepEvent) if event.rank == 3)
    assert taken == STEPS
    assert len(versions) < STEPS, "the slow one gives up"
    applied = {update.source: 0 for update in run.of(UpdateEvent)}
    assert 3 not in applied or len([u for u in run.of(UpdateEvent) if u.source == 3]) <= len(versions)


@pytest.mark.parametrize(("n", "workers"), few([(1, 6), (2, 6), (3, 6), (6, 6)], (2, 6), (6, 6)))
def test_mean_staleness_of_softsync_is_the_others_over_c(n, workers):
    """(workers - 1) / c, whatever the service times (Zhang et al. 2016 give n, its upper neighbor)."""
    for compute in ("exponential(0.05)", "normal(0.05, cv=0.1)"):
        run = run_strategy(f"ps(softsync({n}))", workers, 400, compute=compute, network="ideal")
        end = min(event.seconds for event in run.of(StepEvent) if event.step == 400)
        late = [update.staleness for update in run.of(UpdateEvent) if update.seconds < end][5 * workers :]
        assert np.mean(late) == pytest.approx((workers - 1) / (workers // n), rel=0.01)


def test_softsync_leaves_nothing_behind():
    run = run_strategy("ps(softsync(1))", 3, 7)
    assert run.deliveries() == {(MASTER, rank): 7 for rank in range(3)}
    assert len({update.seconds for update in run.of(UpdateEvent)}) == 7
    odd = run_strategy("ps(k_batch_async(4))", 3, 7)  # 21 = 5 × 4 + 1
    assert odd.deliveries() == {(MASTER, rank): 7 for rank in range(3)}


def drifts(run, delta):
    """For each admitted read, how far the server had moved from the oldest parameters that others computed on."""
    found, reading, held = [], {}, {}
    for entry in run.simulation.log:
        if not isinstance(entry, Sent):
            continue
        message = entry.message
        if message.tag == "push" and entry.to == MASTER:
            reading.pop(message.source, None)
        elif message.reply_to and message.source == MASTER:
            version = message.note.version
            held[version] = message.payload
            others = [v for rank, v in reading.items() if v in held]
            if others:
                found.append(float(np.max(np.abs(message.payload - held[min(others)]))))
            reading[entry.to] = version
        elif message.tag == "leave":
            reading.pop(message.source, None)
    return found


@pytest.mark.parametrize("delta", [0.01, 0.03])
def test_nobody_reads_what_has_moved_by_delta(delta):
    run = run_strategy(f"ps(value_bound({delta}))", 4, 40, compute=STRAGGLER)
    assert drifts(run, delta)
    assert max(drifts(run, delta)) < delta
    assert max(drifts(run_strategy("asgd", 4, 40, compute=STRAGGLER), delta)) > delta


def test_a_bound_below_every_update_still_goes_on_and_falls():
    tight = run_strategy("ps(value_bound(1e-9))", 4, STEPS)
    assert {event.step for event in tight.of(StepEvent)} == set(range(1, STEPS + 1))
    falling, fixed = (run_strategy(f"ps(value_bound(0.1{more}))", 4, 60) for more in (", decreasing=True", ""))
    assert falling.seconds > fixed.seconds


def test_tasks_are_never_more_than_tau_apart_and_none_is_bulk_synchronous():
    for tau in (0, 1, 3):
        run = run_strategy(f"ps(bounded_delay({tau}))", 4, 30, compute=STRAGGLER)
        clocks, ahead = [0] * 4, 0
        for entry in run.simulation.log:
            if isinstance(entry, Sent) and entry.message.tag == "push" and entry.to == MASTER:
                clocks[entry.message.source] += 1
            elif isinstance(entry, Sent) and entry.message.reply_to:
                ahead = max(ahead, clocks[entry.to] - min(clocks))
        assert ahead == tau
    one, other = (run_strategy(f"ps({rule})", 4, 30, compute=STRAGGLER) for rule in ("bounded_delay(0)", "bsp"))
    assert equal_bits(one.server, other.server)
    assert one.events == other.events


@pytest.mark.parametrize("rule", ["ssp(2)", "bounded_delay(2)", "essp(2)", "value_bound(0.01)", "k_async(3)"])
def test_the_dead_are_taken_out(rule):
    run = run_strategy(f"ps({rule})", 4, 30, faults=["dies(1, 0.3)"])
    steps = {rank: max(event.step for event in run.of(StepEvent) if event.rank == rank) for rank in range(4)}
    assert steps[1] < 30
    assert {steps[rank] for rank in (0, 2, 3)} == {30}


def test_as_many_may_die_as_there_are_backups():
    run = run_strategy("ps(backup(2))", 5, 30, faults=["dies(1, 0.3)", "dies(2, 0.4)"])
    assert max(event.step for event in run.of(StepEvent) if event.rank == 0) == 30
    with pytest.raises(
        PeerLost, match="a step takes the gradients of 4 workers, but 2 of 5 workers are lost; configure fewer"
    ):
        run_strategy("ps(backup(1))", 5, 30, faults=["dies(1, 0.3)", "dies(2, 0.4)"])


@pytest.mark.parametrize(
    ("kind", "arguments", "complaint"),
    [
        (BackupWorkers, (-1,), "b must be >= 0 backup workers, got -1"),
        (BoundedDelay, (-1,), "tau must be >= 0 tasks, got -1"),
        (EagerStaleSynchronous, (-1,), "got -1; use asynchronous for no bound"),
        (KAsync, (0,), "k must be >= 1 gradients, got 0"),
        (SoftSync, (0,), "n must be >= 1, got 0"),
        (ValueBound, (0.0,), "delta must be > 0, got 0.0"),
        (ValueBound, (float("nan"),), "delta must be > 0, got nan"),
    ],
)
def test_impossible_settings_are_refused(kind, arguments, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        kind(*arguments)


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (BackupWorkers(4), "b=4 leaves 0 gradients for a step"),
        (KSync(5), "k=5, but the number must be >= 1 and <= 4"),
        (KSync(0), "k=0, but the number must be >= 1 and <= 4"),
        (KAsync(5), "k must be <= 4, the number of workers, got 5"),
        (SoftSync(5), "n must be <= 4, the number of workers, got 5"),
    ],
    ids=str,
)
def test_more_than_there_are_workers_is_refused(rule, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        ParameterServer(rule).check(4)


def test_classes_and_who_can_be_sharded():
    classes = {rule: Consistency.parse(rule).delivery for rule in ("backup(1)", "k_sync(2)", "softsync(1)", "essp(1)")}
    assert classes == {
        "backup(1)": "partial",
        "k_sync(2)": "partial",
        "softsync(1)": "unbounded delay",
        "essp(1)": "bounded delay",
    }
    assert KBatchAsync(3).survives
    with pytest.raises(CompositionError, match="use shards=1"):
        Strategy.parse("ps(backup(1), shards=2)")
    assert Asynchronous().delivery == "unbounded delay"
