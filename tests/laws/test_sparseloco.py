"""SparseLoCo: DiLoCo whose outer gradients travel as the largest elements in two bits, with a decaying error."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.codecs.base import Codec
from flockstep.codecs.binned import Binned
from flockstep.errors import ConfigurationError
from flockstep.feedback.residual import Residual
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import GradientSource, bowl_job, check_strategy, run_strategy
from support.codecs import normal, trip
from support.oracles.sparseloco import quantize, sparseloco

JOB = bowl_job("sgd(lr=0.1)", dimension=64)
ROUNDS, PERIOD, CHUNK, K = 6, 4, 16, 4


def composed(decay=0.9, values="binned"):
    codec = f"topk({K / CHUNK}, bucket={CHUNK}, values={values})"
    outer = "outer_optimizer=nesterov(0.8, 0)"
    return f"streaming_diloco({PERIOD}, 1, 0, {outer}, codec={codec}, feedback=residual({decay}))"


def expected(n, bits):
    source = GradientSource(n, JOB)
    settings = {"shape": (n, PERIOD), "lr": 0.1, "outer": (0.8, 0.9), "compression": (CHUNK, K, bits)}
    return sparseloco(source.start(), lambda r, w, _: source.gradient(r, w), ROUNDS, **settings)


@pytest.mark.oracle("feedback:residual", "codec:binned", "codec:topk")
@pytest.mark.parametrize(("values", "bits"), [("binned", 2), ("binned(3)", 3), ("identity", None)])
@pytest.mark.parametrize("n", [1, 3])
def test_the_composition_equals_algorithm_1(n, values, bits):
    run = run_strategy(composed(values=values), n, ROUNDS * PERIOD, job=JOB)
    oracle = expected(n, bits)
    assert np.abs(run.replicas - oracle.models[-1]).max() < 1e-12
    errors = np.stack([run.nodes[rank].state[0].dropped for rank in range(n)])
    assert np.abs(errors - oracle.e).max() < 1e-12


@pytest.mark.negative_control("feedback:residual")
def test_an_error_that_does_not_decay_shows():
    run = run_strategy(composed(decay=1), 3, ROUNDS * PERIOD, job=JOB)
    assert np.abs(run.replicas - expected(3, 2).models[-1]).max() > 1e-3


@pytest.mark.oracle("codec:binned")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_binned_equals_the_authors_quantizer(bits, dtype):
    rounding = 4 * np.finfo(dtype).eps
    for x in (normal(500, 3, dtype), normal(500, 4, dtype) ** 3, np.full(40, -0.3, dtype), np.eye(1, 50, 7, dtype)[0]):
        assert np.allclose(trip(Binned(bits), x), quantize(x.astype(np.float64), bits), rtol=rounding, atol=rounding)


def test_the_sum_of_a_tensor_is_kept():
    x = normal(1000, 5, np.float64) ** 3 + 0.2
    assert trip(Binned(), x).sum() == pytest.approx(x.sum(), rel=1e-12)


def test_two_tensors_have_bins_of_their_own():
    x = np.concatenate([normal(100), 1000 * normal(100, 1)])
    decoded = trip(Binned().bind_shapes([(100,), (100,)]), x)
    assert np.array_equal(decoded[:100], trip(Binned(), x[:100]))
    assert len(np.unique(decoded)) == 8


class CentersOfBins(Binned):
    """Wrong codec: sends the centers of the bins in place of the means of what is in them."""

    def coded(self, floats, random):
        data = super().coded(floats, random)
        centers = floats.mean() + 6 * floats.std(ddof=1) / 4 * np.arange(-2, 2)
        data[: 4 * floats.itemsize] = centers.astype(floats.dtype).view(np.uint8)
        return data


@pytest.mark.negative_control("codec:binned")
def test_centers_in_place_of_means_are_noticed():
    x = normal(500)
    assert not np.allclose(trip(CentersOfBins(), x), quantize(x.astype(np.float64), 2), atol=1e-2)


def test_the_published_setting_takes_two_bits_and_an_index_for_one_element_in_64():
    codec = Strategy.parse("sparseloco").codec.bind_shapes([(256, 64), (64,)])
    values = 4 * 64
    biases = 4 * 64
    assert codec.wire_bytes(256 * 64 + 64, "float32") == values * 12 // 8 + 4 * 4 + values * 2 // 8 + biases
    assert Strategy.parse("sparseloco").feedback == Residual(0.95)


def test_conforms():
    check_strategy(Strategy.parse(composed()), workers=(1, 3), alone_is_plain=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("binned(1)", "bits of binned must be 2 to 4, got 1; for more bits use int8"),
        ("binned(sigmas=7)", "sigmas of binned must be > 0 and <= 6 standard deviations, got 7.0; 6 is usual"),
    ],
)
def test_impossible_settings_are_refused(text, message):
    with pytest.raises(ConfigurationError, match=message):
        Codec.parse(text)
    with pytest.raises(ConfigurationError, match=r"decay of residual must be in \(0, 1\], got 0.0; 1 loses nothing"):
        Residual(0.0)
