"""Gradient coding against plain numpy: exact from any n - s workers, and as fast as the (n - s)-th."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from flockstep.errors import PeerLost
from flockstep.records.events import StepEvent
from flockstep.strategies.gradient_coding import GradientCoding, code, decoder
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy, small_job

CODES = [("cyclic", 5, 1), ("cyclic", 6, 2), ("cyclic", 10, 3), ("fractional", 6, 1), ("fractional", 6, 2)]


@pytest.mark.parametrize(("scheme", "n", "s"), CODES)
def test_every_set_of_survivors_gives_the_exact_sum(scheme, n, s):
    b = code(scheme, n, s)
    assert (np.count_nonzero(b, axis=1) == s + 1).all()
    for survivors in combinations(range(n), n - s):
        weights = decoder(scheme, n, s, survivors)
        assert np.abs(np.asarray(weights) @ b[list(survivors)] - 1).max() <= 1e-9


@pytest.mark.parametrize(("scheme", "n", "s"), CODES)
def test_one_more_missing_is_refused(scheme, n, s):
    with pytest.raises(PeerLost, match=rf"{s + 1} of {n} workers are missing"):
        decoder(scheme, n, s, tuple(range(n - s - 1)))


def oracle(n, steps):
    """Synchronous SGD with momentum over n blocks, one batch of each a step."""
    source = GradientSource(n, small_job("sgd(lr=0.1, momentum=0.9)"))
    w = source.start()
    stepper = source.stepper(w)
    for _ in range(steps):
        total = np.full_like(w, -0.0)
        for block in range(n):
            total += source.gradient(block, w)
        stepper.step(w, total / np.float32(n))
    return w


@pytest.mark.oracle("strategy:gradient_coding")
@pytest.mark.parametrize("n", [1, 2, 5])
def test_without_redundancy_it_is_synchronous_sgd_in_every_bit(n):
    run = run_strategy("gradient_coding(0)", n, 12, job=small_job("sgd(lr=0.1, momentum=0.9)"))
    assert equal_bits(*run.replicas, run.server, oracle(n, 12))


@pytest.mark.oracle("strategy:gradient_coding")
@pytest.mark.parametrize(
    ("text", "n"),
    [("gradient_coding(1, cyclic)", 5), ("gradient_coding(2, cyclic)", 6), ("gradient_coding(1, fractional)", 6)],
)
def test_with_redundancy_it_is_synchronous_sgd_too(text, n):
    run = run_strategy(text, n, 12, job=small_job("sgd(lr=0.1, momentum=0.9)"))
    assert np.allclose(run.server, oracle(n, 12), rtol=0, atol=2e-5)
    assert equal_bits(*run.replicas, run.server)


def test_who_is_late_changes_no_bit_of_the_fractional_code():
    runs = [
        run_strategy("gradient_coding(1, fractional)", 4, 12, compute=f"speeds(exponential(0.05), {slow})")
        for slow in ("(9, 1, 1, 1)", "(1, 9, 1, 1)", "(1, 1, 9, 9)")
    ]
    assert equal_bits(*(run.server for run in runs))
    assert runs[0].seconds != runs[1].seconds


def test_a_step_takes_as_long_as_the_fastest_n_minus_s():
    factors = (1, 2, 3, 5, 8)
    run = run_strategy("gradient_coding(2, cyclic)", 5, 4, compute=f"speeds(constant(1), {factors})", network="ideal")
    ends = [event.seconds for event in run.of(StepEvent) if event.rank == 0]
    assert ends == pytest.approx([3 * 3 * step - 6 for step in (1, 2, 3, 4)])  # three blocks each, the third is awaited
    assert run.seconds == pytest.approx(4 * 3 * 3)


def test_one_vector_per_worker_travels_each_way():
    run = run_strategy("gradient_coding(1, cyclic)", 4, 10, compute="constant(1)", network="ideal")
    assert len(run.sent("fresh")) == 40
    assert {entry.message.payload_bytes for entry in run.sent("coded")} == {18 * 4}
    assert 30 <= len(run.sent("coded")) <= 40


@pytest.mark.parametrize("scheme", ["cyclic", "fractional"])
def test_s_workers_may_die_and_not_one_more(scheme):
    deaths = ["dies(1, 2.5)", "dies(4, 7.5)"]
    run = run_strategy(GradientCoding(2, scheme), 6, 12, compute="constant(0.5)", network="ideal", faults=deaths)
    assert np.allclose(run.server, run_strategy("gradient_coding(0)", 6, 12).server, rtol=0, atol=2e-5)
    with pytest.raises(PeerLost, match="3 workers are lost, but gradient coding with s=2 tolerates only 2"):
        run_strategy(GradientCoding(2, scheme), 6, 12, compute="constant(0.5)", faults=[*deaths, "dies(0, 9)"])


@pytest.mark.negative_control("strategy:gradient_coding")
def test_without_the_code_the_sum_is_wrong():
    survivors = tuple(range(4))
    weights = decoder("cyclic", 5, 1, survivors)
    plain = np.sign(np.abs(code("cyclic", 5, 1)))[list(survivors)]
    assert np.abs(np.asarray(weights) @ plain - 1).max() > 1e-3
