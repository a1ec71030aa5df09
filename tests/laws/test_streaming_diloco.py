"""Streaming DiLoCo against plain numpy: which fragment travels when, what arrives later, and what a replica keeps."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.strategies.base import Strategy
from flockstep.strategies.streaming_diloco import StreamingDiloco
from flockstep.testing.strategies import GradientSource, bowl_job, check_strategy, equal_bits, run_strategy, small_job
from support.averaging import local_steps, ring_mean

F = np.float32


def oracle(n, steps, period, fragments, tau, alpha, job=None):
    """Every fragment with a Nesterov step of its own on what was snapped tau steps before."""
    theta = GradientSource(n, job).start()
    parts = slices(len(theta), fragments)
    v, snapped = np.zeros_like(theta), {}

    def meet(step, w):
        for p, part in enumerate(parts):
            if step % period == p * period // fragments:
                snapped[p, step + tau] = ring_mean([replica[part].copy() for replica in w])
            if (p, step) in snapped or (step == steps and [key for key in snapped if key[0] == p]):
                due = min(key for key in snapped if key[0] == p)
                delta = theta[part] - snapped.pop(due)
                v[part] = F(0.9) * v[part] + delta
                theta[part] -= F(0.7) * (delta + F(0.9) * v[part])
                for replica in w:
                    kept = F(alpha if tau else 0)
                    replica[part] = kept * replica[part] + (F(1) - kept) * theta[part]

    return np.stack(local_steps(n, steps, meet, job))


@pytest.mark.oracle("strategy:streaming_diloco")
@pytest.mark.parametrize("inner", ["sgd(lr=0.1, momentum=0.9)", "adamw(lr=0.02)"])
@pytest.mark.parametrize(
    ("fragments", "tau", "alpha"), [(1, 0, 0.5), (3, 0, 0.0), (3, 2, 0.5), (4, 5, 0.25), (7, 1, 0)]
)
@pytest.mark.parametrize("n", [1, 3])
def test_equals_the_oracle_in_every_bit(n, fragments, tau, alpha, inner):
    job = small_job(inner)
    run = run_strategy(f"streaming_diloco(8, {fragments}, {tau}, {alpha})", n, 30, job=job)
    assert equal_bits(run.replicas, oracle(n, 30, 8, fragments, tau, alpha, job))


@pytest.mark.parametrize("outer", ["nesterov", "average", "adam", "bmuf"])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_one_fragment_without_overlap_is_diloco(alpha, outer):
    one = run_strategy(f"streaming_diloco(5, 1, 0, {alpha}, {outer})", 4)
    assert equal_bits(one.replicas, run_strategy(f"local_sgd(5, outer_optimizer={outer})", 4).replicas)


def test_each_fragment_travels_once_in_a_period():
    """Steps at which a fragment's first message leaves worker 0, by fragment."""
    run = run_strategy("streaming_diloco(12, 4, 2)", 3, 36)
    begun = {p: sorted({s.message.step for s in run.sent(f"reduce/fragment{p}", 0)}) for p in range(4)}
    assert [steps[0] for steps in begun.values()] == [12, 3, 6, 9]
    sizes = [part.stop - part.start for part in slices(18, 4)]
    elements = Counter()
    for tag in ("reduce", "gather"):
        for p in range(4):
            for sent in run.sent(f"{tag}/fragment{p}"):
                elements[p] += sent.message.array.size
    assert elements == {p: 2 * 2 * size * 3 for p, size in enumerate(sizes)}
    assert sum(totals.sent_bytes for totals in run.totals.values()) == 3 * 2 * 2 * 18 * 4


def test_overlap_hides_the_network():
    """Each of the means takes less time than the steps that it may take: nobody ever waits."""
    job, link = bowl_job(dimension=4000), "link(bandwidth=50000)"
    seconds = {
        tau: run_strategy(f"streaming_diloco(8, 2, {tau})", 4, 32, job=job, compute="constant(1)", network=link).seconds
        for tau in (0, 3)
    }
    one = 2 * 3 / 4 * 2000 * 8 / 50000
    assert seconds[0] == pytest.approx(32 + 8 * one, rel=0.01)
    assert seconds[3] == pytest.approx(32 + one, rel=0.01), "but for the last mean, begun at the last step"


def test_conforms():
    check_strategy(Strategy.parse("streaming_diloco(10, 2, 0, outer_optimizer=average)"), workers=(1, 3))
    check_strategy(Strategy.parse("streaming_diloco(8, 3, 2)"), workers=(3,))


class SharesOneMomentum(StreamingDiloco):
    """Wrong strategy: all fragments use the optimizer state of the first."""

    def worker_state(self, me):
        fragments = super().worker_state(me)
        for fragment in fragments:
            fragment.outer_state = fragments[0].outer_state
        return fragments


class TakesWhatItHasNow(StreamingDiloco):
    """Wrong strategy: starts computing the mean only when the mean is due."""

    def offset(self, index):
        return (super().offset(index) + 1) % self.period


@pytest.mark.negative_control("strategy:streaming_diloco")
@pytest.mark.parametrize("kind", [SharesOneMomentum, TakesWhatItHasNow])
def test_a_broken_one_shows(kind):
    run = run_strategy(kind(8, 3, 2), 3, 30)
    assert np.abs(run.replicas - oracle(3, 30, 8, 3, 2, 0.5)).max() > 1e-3


@pytest.mark.oracle("strategy:streaming_diloco")
@pytest.mark.parametrize("feedback", ["none", "residual"])
def test_encoded_outer_gradients_equal_the_oracle(feedback):
    """theta less the mean of the rounded outer gradients, and what each rounding dropped; one fragment, no overlap."""
    n, period, steps = 3, 4, 20
    theta = GradientSource(n).start()
    v, errors = np.zeros_like(theta), np.zeros((n, len(theta)), F)

    def meet(step, w):
        if step % period == 0:
            total = np.zeros_like(theta)
            for rank, replica in enumerate(w):
                p = errors[rank] + (theta - replica)
                total += p.astype(np.float16).astype(F)
                errors[rank] = (p - p.astype(np.float16).astype(F)) * (feedback == "residual")
            delta = theta - (theta - total / F(n))
            v[:] = F(0.9) * v + delta
            theta[:] -= F(0.7) * (delta + F(0.9) * v)
            for replica in w:
                replica[:] = theta

    text = f"streaming_diloco({period}, 1, 0, codec=half, feedback={feedback})"
    assert equal_bits(run_strategy(text, n, steps).replicas, np.stack(local_steps(n, steps, meet)))
    exact = run_strategy(f"streaming_diloco({period}, 1, 0)", n, steps)
    assert not equal_bits(run_strategy(text, n, steps).replicas, exact.replicas)


@pytest.mark.parametrize("n", [2, 3])
def test_encoded_bytes_are_exact(n):
    """Every worker's code of every fragment goes around the ring: n (n-1) times 2 bytes an element."""
    run = run_strategy("streaming_diloco(12, 4, 2, codec=half)", n, 36)
    assert sum(totals.sent_bytes for totals in run.totals.values()) == 3 * n * (n - 1) * 18 * 2


def test_conforms_with_a_codec():
    check_strategy(
        Strategy.parse("streaming_diloco(10, 2, 0, codec=half, feedback=residual)"),
        workers=(1, 3),
        alone_is_plain=False,
    )
    check_strategy(Strategy.parse("streaming_diloco(8, 3, 2, codec=dct(1, 3))"), workers=(3,))
