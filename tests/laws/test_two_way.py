"""Codecs on both ways: the trajectory of the algorithm, what both ends keep, equal bits, exact bytes."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.codecs.half import Half
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import GradientSource, check_strategy, equal_bits, run_strategy, small_job
from support.matrix import few

STEPS = 15
SIZE = 18


def rounded(x):
    return x.astype(np.float16).astype(x.dtype)


def oracle(n, *, codec=rounded, gradients=True, means=True, back=True, job=None, steps=STEPS):
    """Every slice on its own: e_i of each worker and e of the owner; `back` says that the mean is encoded, too."""
    source = GradientSource(n, job or small_job())
    w = source.start()
    stepper = source.stepper(w)
    errors, owners = np.zeros((n, w.size), w.dtype), np.zeros_like(w)
    for _ in range(steps):
        total = np.empty_like(w)
        given = [source.gradient(rank, w) for rank in range(n)]
        for part in slices(w.size, n):
            sent = []
            for rank in range(n):
                p = errors[rank, part] + given[rank][part]
                sent.append(codec(p))
                errors[rank, part] = (p - sent[-1]) * gradients
            mean = sum(sent[1:], sent[0]) / w.dtype.type(n)
            p = owners[part] + mean
            total[part] = codec(p) if back else mean
            owners[part] = (p - total[part]) * means
        stepper.step(w, total)
    return w, errors, owners


@pytest.mark.oracle("strategy:two_way")
@pytest.mark.parametrize("n", [1, 2, 3, 4, 20])
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1)", "adam(lr=0.02)"])
def test_trajectory_equals_the_oracle(n, optimizer):
    job = small_job(optimizer)
    run = run_strategy("two_way(half, residual)", n, STEPS, job=job)
    w, errors, owners = oracle(n, job=job)
    assert equal_bits(run.result, *run.replicas, w)
    for rank, part in enumerate(slices(SIZE, n)):
        state = run.nodes[rank].state
        assert equal_bits(np.concatenate(state.gradients), errors[rank])
        assert equal_bits(state.mean, owners[part])


@pytest.mark.oracle("strategy:two_way")
@pytest.mark.parametrize("n", [2, 3])
def test_without_feedback_equals_the_oracle(n):
    run = run_strategy("two_way(half, none)", n, STEPS)
    assert equal_bits(run.result, oracle(n, gradients=False, means=False)[0])


@pytest.mark.negative_control("strategy:two_way")
@pytest.mark.parametrize("wrong", [{"gradients": False}, {"means": False}, {"back": False}])
def test_the_oracle_notices_what_is_wrong(wrong):
    run = run_strategy("two_way(half, residual)", 3, STEPS)
    assert not equal_bits(run.result, oracle(3, **wrong)[0])


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_bytes_are_exact(n):
    run = run_strategy("two_way(half, residual)", n, STEPS)
    sizes = [Half().wire_bytes(part.stop - part.start, "float32") for part in slices(SIZE, n)]
    for rank, totals in run.totals.items():
        assert totals.sent_bytes == STEPS * (sum(sizes) - sizes[rank] + (n - 1) * sizes[rank])
        assert totals.messages_sent == totals.messages_received == STEPS * 2 * (n - 1)
    assert sum(b.sent_bytes for b in run.totals.values()) == STEPS * 2 * (n - 1) * SIZE * 2


@pytest.mark.parametrize(
    "text", few(["two_way", "two_way(half, none)", "two_way(dct(k=1, chunk=5))"], "two_way(half, none)")
)
def test_conforms(text):
    check_strategy(Strategy.parse(text), workers=(1, 3), alone_is_plain=False)
