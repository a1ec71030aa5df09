"""What each consistency rule promises: about time, staleness, values and the dead."""

from __future__ import annotations

import pytest

from flockstep.errors import CompositionError, ConfigurationError, PeerLost
from flockstep.messages import MASTER
from flockstep.records.events import StepEvent
from flockstep.strategies.base import Strategy
from flockstep.strategies.consistency import Asynchronous, Consistency
from flockstep.strategies.consistency.bounded_delay import BoundedDelay
from flockstep.strategies.consistency.first_of import BackupWorkers, KSync
from flockstep.strategies.consistency.k_async import KAsync, KBatchAsync
from flockstep.strategies.consistency.softsync import SoftSync
from flockstep.strategies.consistency.stale_synchronous import EagerStaleSynchronous
from flockstep.strategies.consistency.value_bound import ValueBound
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.testing.strategies import run_strategy


def test_a_cache_spares_reads():
    asked, always = (run_strategy(f"ps({rule}(8))", 4, 40) for rule in ("cached_ssp", "ssp"))
    reads = [entry for entry in asked.sent("read") if not entry.message.reply_to]
    assert 0 < len(reads) < 0.6 * 4 * 40
    assert asked.totals[MASTER].sent_bytes < 0.6 * always.totals[MASTER].sent_bytes
    assert asked.totals[MASTER].received_bytes == always.totals[MASTER].received_bytes


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
