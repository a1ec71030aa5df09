"""DDP's buckets against plain numpy, and when they are finished."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.collectives.ring import Ring
from flockstep.messages import HEADER_BYTES
from flockstep.nodes import Worker
from flockstep.simulation.compute import portion
from flockstep.strategies.bucketed import Bucketed, buckets
from flockstep.testing.strategies import GradientSource, equal_bits, run_strategy, small_job

SMALL = "cap=28e-6, first=12e-6"  # 7 and 3 elements of 4 bytes
STEPS = 12


CUTS = (slice(15, 18), slice(8, 15), slice(1, 8), slice(0, 1))


def oracle(n, optimizer="sgd(lr=0.1)", accumulate=1, steps=STEPS):
    """One model, stepped by the mean of the workers' means over `accumulate` batches, summed in the ring's order."""
    source = GradientSource(n, small_job(optimizer))
    w = source.start()
    stepper = source.stepper(w)
    for done in range(0, steps, accumulate):
        count = min(accumulate, steps - done)
        means = []
        for rank in range(n):
            total = source.gradient(rank, w)
            for _ in range(count - 1):
                total = total + source.gradient(rank, w)
            means.append(total / np.float32(count) if accumulate > 1 else total)
        whole = np.empty_like(w)
        for cut in CUTS if count == accumulate else [slice(0, 18)]:
            part = np.zeros(cut.stop - cut.start, np.float32)
            base, extra = divmod(len(part), n)
            start = 0
            for chunk in range(n):
                stop = start + base + (chunk < extra)
                piece = means[chunk][cut][start:stop].copy()
                for hop in range(1, n):
                    piece += means[(chunk + hop) % n][cut][start:stop]
                part[start:stop] = piece
                start = stop
            whole[cut] = part / np.float32(n)
        stepper.step(w, whole)
    return w


@pytest.mark.oracle("strategy:bucketed")
@pytest.mark.parametrize("optimizer", ["sgd(lr=0.1, momentum=0.9)", "adam(lr=0.02)"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_equals_the_oracle_in_every_bit(n, optimizer):
    run = run_strategy(f"bucketed({SMALL})", n, STEPS, job=small_job(optimizer))
    assert equal_bits(*run.replicas, oracle(n, optimizer))


@pytest.mark.parametrize("accumulate", [2, 3, 5])
def test_accumulated_batches_are_one_large_batch(accumulate):
    """12 steps of 5 batches are two steps and a rest of two batches."""
    run = run_strategy(f"bucketed({SMALL}, accumulate={accumulate})", 3, STEPS)
    assert equal_bits(*run.replicas, oracle(3, accumulate=accumulate))
    rounds = -(-STEPS // accumulate)
    assert sum(totals.sent_bytes for totals in run.totals.values()) == rounds * 2 * 2 * 18 * 4


@pytest.mark.parametrize("size", [1, 2, 3, 18, 1000])
def test_buckets_hold_every_element_once_from_the_end(size):
    parts = buckets(size, 4, Bucketed(cap=28e-6, first=12e-6))
    assert np.concatenate([np.arange(part.start, part.stop)[::-1] for part in parts]).tolist() == [*range(size)][::-1]
    assert all(part.stop - part.start <= (7 if index else 3) for index, part in enumerate(parts))


def test_a_step_ends_when_its_last_bucket_does():
    """max over buckets of (ready, end of the one before) + its own time, on a link that is the bottleneck."""
    bandwidth = 300.0
    run = run_strategy(f"bucketed({SMALL})", 2, 1, compute="constant(1)", network=f"link(bandwidth={bandwidth})")
    end = 0.0
    for part in buckets(18, 4, Bucketed(cap=28e-6, first=12e-6)):
        ready = portion(1 - part.start / 18)
        larger = -(-(part.stop - part.start) // 2)
        # Reduce-scatter and gather each pass one half between the two workers; the larger one decides.
        end = max(end, ready) + 2 * (4 * larger + HEADER_BYTES) / bandwidth
    assert run.seconds == pytest.approx(end, rel=0.05)
    late = run_strategy("all_reduce", 2, 1, compute="constant(1)", network=f"link(bandwidth={bandwidth})").seconds
    assert late == pytest.approx(1 + 2 * (4 * 9 + HEADER_BYTES) / bandwidth)


class ForgetsTheLast(Ring):
    """Negative control: does not average the bucket that has one element."""

    async def divided_sum(self, me: Worker, array: np.ndarray, divisor: int) -> None:
        if len(array) > 1:
            await super().divided_sum(me, array, divisor)


@pytest.mark.negative_control("strategy:bucketed")
def test_a_bucket_that_is_not_averaged_shows():
    run = run_strategy(Bucketed(cap=28e-6, first=12e-6, collective=ForgetsTheLast()), 3, STEPS)
    assert not equal_bits(*run.replicas)
    assert not np.allclose(run.result, oracle(3), atol=1e-4)
