"""Sandblaster L-BFGS against a serial L-BFGS in plain numpy; portions, backup tasks, deaths."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.errors import ConfigurationError
from flockstep.messages import Message
from flockstep.records.events import StepEvent
from flockstep.strategies.coordinator import ARMIJO, Portions
from flockstep.strategies.sandblaster import ShardState
from flockstep.testing.strategies import GradientSource, run_strategy, small_job

JOB = small_job(dtype="float64")
STEPS = 60


def evaluated(source, w):
    gradient = np.empty_like(w)
    loss = source.engine.gradient(w, np.arange(source.engine.train_size), gradient)
    return loss, gradient


def two_loop(gradient, pairs):
    q, alphas = gradient.copy(), []
    for s, y in reversed(pairs):
        alphas.append((s @ q) / (s @ y))
        q -= alphas[-1] * y
    if pairs:
        s, y = pairs[-1]
        q *= (s @ y) / (y @ y)
    for (s, y), alpha in zip(pairs, reversed(alphas), strict=True):
        q += (alpha - (y @ q) / (s @ y)) * s
    return -q


def serial(evaluations, history=10):
    """L-BFGS with Armijo backtracking on the whole training set, so many evaluations in all."""
    source = GradientSource(job=JOB)
    w = source.start()
    (loss, gradient), pairs, left = evaluated(source, w), [], evaluations - 1
    while left:
        d, t, before = two_loop(gradient, pairs), 1.0, w
        slope = gradient @ d
        while left:
            left -= 1
            trial = before + t * d
            new, slopes = evaluated(source, trial)
            if new <= loss + ARMIJO * t * slope:
                s, y = trial - before, slopes - gradient
                pairs = [*pairs, (s, y)][-history:] if s @ y > 0 else pairs
                w, loss, gradient = trial, new, slopes
                break
            t /= 2
    return w


@pytest.mark.oracle("strategy:sandblaster")
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize(("n", "portions", "history"), [(1, 4, 10), (3, 6, 10), (4, 5, 2)])
def test_equals_serial_l_bfgs(n, portions, history, shards):
    run = run_strategy(f"sandblaster({portions}, 0, {history}, {shards})", n, STEPS, job=JOB)
    taken = len(run.of(StepEvent))
    assert taken % portions == 0
    assert n * STEPS - portions < taken <= n * STEPS
    assert np.allclose(run.server, serial(taken // portions, history), rtol=0, atol=1e-10)


@pytest.mark.parametrize("backups", [0, 1, 2])
def test_backup_tasks_hide_a_slow_worker_and_count_once(backups):
    """Worker 2 takes 20 times as long."""
    text, pace = f"sandblaster(6, {backups}, 10, 2)", "speeds(constant(1), (1, 1, 20))"
    run = run_strategy(text, 3, STEPS, job=JOB, compute=pace, network="ideal")
    sent = [entry.message for entry in run.sent("ask/shard", 0) + run.sent("ask/shard", 1) + run.sent("ask/shard", 2)]
    keys = [(m.source, m.note.evaluation, m.note.portion) for m in sent if m.note.op == "portion"]
    portions = [(evaluation, portion) for _, evaluation, portion in keys[::2]]  # one message to each shard
    assert (len(portions) > len(set(portions))) == (backups > 0)
    evaluations = max(evaluation for evaluation, portion in set(portions) if (evaluation, 5) in set(portions))
    assert np.allclose(run.server, serial(evaluations), rtol=0, atol=1e-9)


def test_with_backups_an_evaluation_does_not_wait_for_the_slowest():
    pace = "speeds(constant(1), (1, 1, 20))"
    times = []
    for backups in (0, 1):
        run = run_strategy(f"sandblaster(6, {backups})", 3, 20, job=JOB, compute=pace, network="ideal")
        whole = max(e.message.note.evaluation for e in run.sent("work"[:4]))
        times.append(run.seconds / whole)
    assert times[1] < times[0] / 2


def test_portions_are_handed_out_in_order_and_the_oldest_again():
    portions = Portions(3, backups=1)
    portions.begin()
    assert [portions.hand_out(rank) for rank in (0, 1, 2, 0)] == [0, 1, 2, 1]
    portions.done(1, 5.0)
    portions.done(1, 7.0)
    assert portions.losses == {1: 5.0}
    assert [portions.hand_out(rank) for rank in (1, 2, 1)] == [0, None, 2]


def test_what_only_the_dead_were_at_is_handed_out_again():
    portions = Portions(2, backups=1)
    portions.begin()
    assert [portions.hand_out(rank) for rank in (0, 1, 2)] == [0, 1, 0]
    portions.lose(1)
    portions.lose(2)
    assert portions.hand_out(3) == 1
    run = run_strategy("sandblaster(6, 0)", 3, 40, job=JOB, compute="constant(1)", faults=["dies(1, 7.5)"])
    taken = len(run.sent("work"))
    assert taken > 60
    assert any(np.allclose(run.server, serial(k), rtol=0, atol=1e-9) for k in range(5, 20))


@pytest.mark.negative_control("strategy:sandblaster")
def test_a_portion_that_counts_twice_is_noticed(monkeypatch):
    """Negative control: shards that add every result add those of backups twice."""

    def add(state: ShardState, message: Message) -> None:
        if message.note.evaluation > state.evaluation:
            state.evaluation = message.note.evaluation
            state.shard.vectors["sum"] = np.zeros_like(message.payload)
        state.shard.vectors["sum"] = state.shard.vectors["sum"] + message.payload

    monkeypatch.setattr("flockstep.strategies.sandblaster._add", add)
    pace = "speeds(constant(1), (1, 1, 1.5))"
    run = run_strategy("sandblaster(4, 2, 10, 2)", 3, STEPS, job=JOB, compute=pace, network="ideal")
    assert not any(np.allclose(run.server, serial(k), rtol=0, atol=1e-9) for k in range(1, 46))


def test_more_portions_than_samples_are_refused():
    with pytest.raises(ConfigurationError, match=r"portions must be <= 240, the number of training samples, got 241"):
        run_strategy("sandblaster(241)", 2, 500)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_that_arrives_after_its_sender_has_died_holds_up_nobody(rank):
    run = run_strategy("sandblaster(portions=5, backups=0)", 3, 15, faults=[f"dies({rank}, 0.0)"])
    assert run.nodes[-1].state.coordinator.granted == {1 - rank: 15, 2: 15}
    assert run.nodes[-1].version > 1


def test_only_the_last_pairs_are_kept():
    run = run_strategy("sandblaster(portions=4, history=2)", 3, 60, job=JOB)
    assert run.nodes[-1].version > 4
    assert sum(name[0] == "y" for name in run.nodes[-1].state.shard.vectors) <= 3
