"""What strategies make of a codec: for the step and the tensors at hand, under feedback, and at both ends alike."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.codecs.by_size import BySize
from flockstep.codecs.damped import Damped
from flockstep.codecs.dgc import Dgc
from flockstep.codecs.identity import Identity
from flockstep.codecs.parts import Parts
from flockstep.codecs.qsgd import Qsgd
from flockstep.codecs.random_subset import RandomK
from flockstep.feedback.momentum import Momentum
from flockstep.feedback.residual import Residual
from flockstep.feedback.sender import bound_codec, random_of
from flockstep.testing.strategies import bowl_job, run_strategy

pytest.importorskip("numba")
SIZE = 1000
SHAPES = ((20, 20), (100,))


def normal(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def warmed(parts, warmup, steps):
    """Bytes of a gradient in these parts, over the first steps of a run."""
    codecs = [Dgc(0.001, warmup).bind_step(step) for step in range(steps)]
    return sum(codec.wire_bytes(part.stop - part.start, "float32") for codec in codecs for part in parts)


@pytest.mark.parametrize("steps", [1, 2, 4, 6])
def test_the_first_gradient_of_a_run_has_the_first_ratio_of_the_warm_up(steps):
    job = bowl_job(dimension=SIZE, dtype="float32")
    run = run_strategy("all_reduce(codec=dgc(warmup=4))", 2, steps, job=job)
    assert run.totals[0].sent_bytes == warmed([slice(0, SIZE)], 4, steps)
    run = run_strategy("ps(shards=3, codec=dgc(warmup=4))", 2, steps, job=job)
    assert run.totals[0].sent_bytes == warmed(slices(SIZE, 3), 4, steps)
    run = run_strategy("scatter_reduce(codec=dgc(warmup=4))", 2, steps, job=job)
    assert run.totals[0].sent_bytes == warmed([slice(500, SIZE)], 4, steps) + steps * 4 * 500


def test_under_feedback_only_tensors_that_need_it_are_damped():
    codec = BySize(Qsgd(1, bucket=64), Identity(), limit=100)
    bound = bound_codec(codec, Residual(), SHAPES, 0)
    assert isinstance(bound, Parts)
    assert bound.codecs == (Damped(Qsgd(1, bucket=64)), Identity())
    assert bound.contraction
    assert bound.exact_parts(500) == [slice(400, 500)]
    x = normal(500)
    data, error = Residual().encode(bound, x, None, np.random.default_rng(0))
    assert np.array_equal(bound.decode(data, 500, "float32")[400:], x[400:])
    assert not error[400:].any()


def test_under_feedback_every_tensor_is_damped_by_its_own_variance():
    codec = BySize(Qsgd(1, bucket=512), Qsgd(4, bucket=16), limit=100)
    bound = bound_codec(codec, Residual(), SHAPES, 0)
    assert bound.codecs[0].factor(400) == 1 / (1 + 20)
    assert bound.codecs[1].factor(100) == 1 / (1 + 1)


def test_what_arrives_as_it_is_beside_a_damped_codec_has_plain_momentum():
    bound, memory = bound_codec(BySize(Qsgd(1, bucket=64), Identity(), limit=100), Momentum(0.5), SHAPES, 0), None
    u = np.zeros(100, np.float32)
    for step in range(5):
        x = normal(500, step)
        data, memory = Momentum(0.5).encode(bound, x, memory, np.random.default_rng(step))
        u = np.float32(0.5) * u + x[400:]
        assert np.array_equal(bound.decode(data, 500, "float32")[400:], u)


def spread_of_mean(codec, x, workers=8, steps=60):
    """Mean squared distance of the mean over workers, all of whom hold `x`, from what one elements' choice sends."""
    own, total = [np.random.default_rng((rank, 7)) for rank in range(workers)], 0.0
    for step in range(steps):
        data = [codec.encode(x, random_of(codec, random, step)) for random in own]
        decoded = [codec.decode(one, len(x), "float32") for one in data]
        total += float(np.sum((np.mean(decoded, axis=0) - x) ** 2))
    return total / steps


def test_workers_do_not_round_alike():
    x = normal(400)
    one = spread_of_mean(RandomK(1.0, values=Qsgd(4, bucket=64)), x, workers=1)
    many = spread_of_mean(RandomK(1.0, values=Qsgd(4, bucket=64)), x)
    assert many < one / 4
    assert RandomK().shares_seed
    assert not RandomK(values=Qsgd()).shares_seed
