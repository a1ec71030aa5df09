"""Epochs that end before the slowest is done: against plain numpy, and which batches were used."""

from __future__ import annotations

import heapq
import math
from collections import Counter

import numpy as np
import pytest

from flockstep.errors import ConfigurationError
from flockstep.records.events import StepEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.epoch_server import EpochServer
from flockstep.testing.strategies import COMPUTE, GradientSource, equal_bits, run_strategy

STRAGGLER = "speeds(exponential(0.05), (1, 1, 1, 5))"
LENGTH = 8


def oracle(share, n=4, epochs=3, compute=COMPUTE):
    """The server's parameters where messages take no time, how many gradients each epoch counted, and when it ended."""
    source = GradientSource(n)
    w = source.start()
    stepper = source.stepper(w)
    batches = [[[] for _ in range(epochs)] for _ in range(n)]
    durations = [ComputeModel.parse(compute).stream(0, rank) for rank in range(n)]
    read, used, mine = [w.copy() for _ in range(n)], [0] * n, [0] * n
    epoch, count, waiting, due, ends, drawn = 0, [0] * (epochs + 1), [], [], [], [0] * n
    for rank in range(n):
        heapq.heappush(due, (next(durations[rank]), rank))
    while due:
        now, rank = heapq.heappop(due)
        while drawn[rank] < mine[rank] * LENGTH + used[rank]:
            source.gradient(rank, w)  # a batch of an epoch that is over
            drawn[rank] += 1
        gradient = source.gradient(rank, read[rank])
        drawn[rank] += 1
        batches[rank][mine[rank]].append(used[rank])
        used[rank] += 1
        stepper.step(w, gradient)
        over = False
        if mine[rank] == epoch:
            count[epoch] += 1
            over = count[epoch] >= math.ceil(share * n * LENGTH)
        answered = [rank]
        if over:
            ends.append(now)
            epoch += 1
            answered = [*waiting, rank]
            waiting = []
        elif mine[rank] == epoch and used[rank] == LENGTH:
            waiting.append(rank)
            answered = []
        for other in answered:
            read[other] = w.copy()
            if mine[other] < epoch:
                mine[other], used[other] = epoch, 0
            if epoch < epochs:
                heapq.heappush(due, (now + next(durations[other]), other))
    return w, count[:epochs], ends, batches


@pytest.mark.oracle("strategy:epoch_server")
@pytest.mark.parametrize("share", [0.5, 0.75, 1.0])
@pytest.mark.parametrize("compute", [COMPUTE, STRAGGLER])
def test_equals_the_oracle(share, compute):
    run = run_strategy(f"epoch_server({share}, {LENGTH})", 4, 3 * LENGTH, compute=compute, network="ideal")
    w, count, ends, batches = oracle(share, compute=compute)
    assert equal_bits(run.server, w)
    assert count == [math.ceil(share * 4 * LENGTH)] * 3
    taken = Counter(event.rank for event in run.of(StepEvent))
    assert [taken[rank] for rank in range(4)] == [sum(map(len, batches[rank])) for rank in range(4)]
    assert run.seconds >= ends[-1]


@pytest.mark.negative_control("strategy:epoch_server")
def test_the_oracle_notices_another_share_and_no_epochs():
    w = oracle(0.75, compute=STRAGGLER)[0]
    for text in (f"epoch_server(1, {LENGTH})", f"epoch_server(0.75, {2 * LENGTH})", "asgd"):
        assert not equal_bits(run_strategy(text, 4, 3 * LENGTH, compute=STRAGGLER, network="ideal").server, w)


def test_every_sample_counts_at_most_once_in_an_epoch_and_enough_of_them_do():
    run = run_strategy(f"epoch_server(0.75, {LENGTH})", 4, 3 * LENGTH, compute=STRAGGLER)
    notes = [(e.message.source, e.message.note) for e in run.sent("push") if not e.message.reply_to]
    pushed = [(rank, note.epoch, note.turn) for rank, note in notes]
    assert len(set(pushed)) == len(pushed)
    assert max(turn for _, _, turn in pushed) <= LENGTH
    for epoch in range(3):
        assert 0.75 * 4 * LENGTH <= sum(batch[1] == epoch for batch in pushed) <= 4 * LENGTH


def test_an_epoch_ends_without_the_dead():
    run = run_strategy(f"epoch_server(1, {LENGTH})", 4, 3 * LENGTH, faults=["dies(3, 0.2)"])
    taken = Counter(event.rank for event in run.of(StepEvent))
    assert [taken[rank] for rank in range(3)] == [3 * LENGTH] * 3
    assert taken[3] < 3 * LENGTH


def test_the_last_epoch_may_be_shorter():
    run = run_strategy(f"epoch_server(1, {LENGTH})", 3, 2 * LENGTH + 3)
    assert {event.step for event in run.of(StepEvent)} == set(range(1, 2 * LENGTH + 4))
    assert np.isfinite(run.server).all()


def test_bad_settings_are_refused():
    with pytest.raises(ConfigurationError, match=r"share must be in \(0, 1\], got 0; Project Adam uses 0.75"):
        EpochServer(0)
    with pytest.raises(ConfigurationError, match="length must be >= 1 steps, got 0"):
        EpochServer(0.75, 0)
