"""What sparsifying codecs send, element by element, against plain numpy; their sizes, bounds and refusals."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from flockstep.codecs.ada_comp import AdaComp
from flockstep.codecs.adaptive_threshold import AdaptiveThreshold
from flockstep.codecs.base import Codec
from flockstep.codecs.dgc import Dgc
from flockstep.codecs.half import Half
from flockstep.codecs.random_subset import RandomK
from flockstep.codecs.threshold import Threshold
from flockstep.codecs.top import TopK
from flockstep.errors import CompositionError, ProtocolError
from flockstep.feedback.residual import Residual
from flockstep.feedback.sender import bound_codec, check_composition
from support.codecs import normal, rng, squared, top, trip

pytest.importorskip("numba")


def agrees_with_the_definition(codec):
    arrays = [normal(997), normal(200_000, 1), np.ones(1000, np.float32), np.repeat(normal(100), 10)]
    return all(np.array_equal(trip(codec, x), top(x, codec.count(len(x)))) for x in arrays)


@pytest.mark.oracle("codec:topk")
def test_topk_sends_the_largest():
    assert agrees_with_the_definition(TopK(0.01))
    assert agrees_with_the_definition(TopK(0.2))


class FirstK(TopK):
    """Wrong codec: sends the first elements instead of the largest."""

    def choose(self, array, random):
        return super().choose(np.arange(len(array), 0, -1, dtype=np.float32), random)


@pytest.mark.negative_control("codec:topk")
def test_a_topk_of_other_elements_is_noticed():
    assert not agrees_with_the_definition(FirstK(0.01))


@pytest.mark.parametrize("size", [100_000, 300_001])
def test_a_sample_finds_nearly_the_largest(size):
    x = normal(size)
    for seed in range(5):
        got, best = trip(TopK(0.01, sampled=True), x, seed), top(x, round(size / 100))
        assert np.count_nonzero(got) == round(size / 100)
        assert squared(got) >= 0.9 * squared(best)
        found = np.flatnonzero(got)
        assert np.isin(found, np.flatnonzero(best)).mean() >= 0.8


@pytest.mark.parametrize("text", ["topk", "topk(sampled=true)"])
def test_sampling_copes_with_arrays_in_which_no_threshold_splits_well(text):
    codec = Codec.parse(text)
    two = np.where(np.arange(100_000) % 50 == 0, 2.0, 1.0).astype(np.float32)
    for x in (np.ones(100_000, np.float32), two, np.zeros(100_000, np.float32), np.eye(1, 100_000, 7)[0]):
        assert np.array_equal(trip(codec, x), top(x, 1000))


def test_a_bucket_has_its_own_largest_and_short_indices():
    x, codec = normal(1300), TopK(16 / 512, bucket=512)
    wanted = np.concatenate([top(x[:512], 16), top(x[512:1024], 16), top(x[1024:], 9)])
    assert np.array_equal(trip(codec, x), wanted)
    assert codec.wire_bytes(1300, "float32") == -(-41 * 9 // 8) + 4 * 41
    assert codec.wire_bytes(512 * 80, "float32") == 80 * 16 * (9 + 32) // 8


def holds_random_k(codec, exact=True):
    """Its subset is of the right size, spread evenly, and its mean is the array where it is scaled."""
    x = np.arange(1, 101, dtype=np.float64)
    draws = np.stack([trip(codec, x, seed) for seed in range(3000)])
    hits = (draws != 0).mean(axis=0)
    assert ((draws != 0).sum(axis=1) == 10).all()
    mean = 10 * hits * x if codec.scaled else hits * x
    even = np.abs(hits - 0.1).max() <= 5 * np.sqrt(0.09 / 3000)
    return even and np.allclose(draws.mean(axis=0), mean)


@pytest.mark.oracle("codec:random_k")
def test_random_k_sends_every_element_as_often():
    assert holds_random_k(RandomK(0.1))
    assert holds_random_k(RandomK(0.1, scaled=True))


class Sticky(RandomK):
    """Wrong codec: chooses the same subset in every step."""

    def choose(self, array, random):
        return super().choose(array, rng(1))


@pytest.mark.negative_control("codec:random_k")
def test_a_random_k_that_is_not_random_is_noticed():
    assert not holds_random_k(Sticky(0.1))


@pytest.mark.oracle("codec:threshold")
def test_threshold_sends_what_is_beyond_it():
    x = normal(1000)
    for t in (0.8, 1.0, float(np.abs(x[6]))):
        assert np.array_equal(trip(Threshold(t), x), np.where(np.abs(x) > np.float32(t), x, 0))


class Inclusive(Threshold):
    """Wrong codec: sends elements with |x| = t too."""

    def __post_init__(self):
        object.__setattr__(self, "t", float(np.nextafter(np.float32(self.t), np.float32(0))))


@pytest.mark.negative_control("codec:threshold")
def test_a_threshold_that_sends_its_own_value_is_noticed():
    x = normal(1000)
    t = float(np.abs(x[6]))
    assert not np.array_equal(trip(Inclusive(t), x), np.where(np.abs(x) > np.float32(t), x, 0))


def test_threshold_is_monotone_and_never_sends_more_than_the_array():
    x = normal(5000)
    sizes = [len(Threshold(t).encode(x, rng())) for t in np.linspace(0, 5, 40)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == x.nbytes
    assert sizes[-1] == 4 + 8, "the largest is always sent"


def adaptive_by_hand(x, ratio):
    """As many as the sample says, where the sample is the array."""
    low = np.sort(np.abs(x))[len(x) - max(1, round(ratio * len(x)))]
    return np.where(np.abs(x) >= low, x, 0)


@pytest.mark.oracle("codec:adaptive_threshold")
def test_adaptive_threshold_sends_its_share():
    x = normal(5000)
    assert np.array_equal(trip(AdaptiveThreshold(0.02), x), adaptive_by_hand(x, 0.02))
    mean, std = x.astype(np.float64).mean(), x.astype(np.float64).std()
    wanted = np.where(np.abs(x) >= np.float32(abs(mean) + 2.3263478740408408 * std), x, 0)
    assert np.array_equal(trip(AdaptiveThreshold(0.02, "gaussian"), x), wanted)
    big = normal(400_000, 1)
    for by in ("sample", "gaussian"):
        for seed in range(5):
            assert 0.75 <= np.count_nonzero(trip(AdaptiveThreshold(0.01, by), big, seed)) / 4000 <= 1.35


@pytest.mark.negative_control("codec:adaptive_threshold")
def test_another_share_is_noticed():
    x = normal(5000)
    assert not np.array_equal(trip(AdaptiveThreshold(0.03), x), adaptive_by_hand(x, 0.02))


@pytest.mark.oracle("codec:dgc")
def test_dgc_is_sampled_topk_that_warms_up():
    x = normal(200_000)
    assert np.array_equal(Dgc(0.01).encode(x, rng()), TopK(0.01, sampled=True).encode(x, rng()))
    ratios = [Dgc(0.001, warmup=8).bind_step(step).ratio for step in range(10)]
    assert ratios == [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.004] * 2 + [0.001] * 2
    assert Dgc(0.1, warmup=4).bind_step(3).ratio == 0.1
    assert Dgc(0.1, warmup=4, values=Half()).bind_step(0).values == Half()


@pytest.mark.negative_control("codec:dgc")
def test_a_dgc_that_does_not_warm_up_is_noticed():
    class Cold(Dgc):
        def bind_step(self, step):
            return replace(self, warmup=0)

    assert Cold(0.001, warmup=8).bind_step(0).ratio != Dgc(0.001, warmup=8).bind_step(0).ratio


def test_residuals_leave_out_the_error_of_unbiased_values_only():
    @dataclass(frozen=True)
    class Rounds(Half):
        biased: bool = True

        @property
        def unbiased(self):
            return not self.biased

    for biased in (True, False):
        codec, error = TopK(0.05) + Rounds(biased), np.zeros(1000, np.float32)
        sent = codec.decode(codec.encode_residual(normal(1000), error, rng()), 1000, "float32")
        chosen = np.flatnonzero(top(normal(1000), 50))
        wanted = (normal(1000) - sent)[chosen] if biased else np.zeros(50)
        assert np.array_equal(error[chosen], wanted)
        assert np.any(sent[chosen] != normal(1000)[chosen])


def test_where_indices_would_cost_more_the_array_itself_is_sent():
    for size, ratio in ((1, 0.01), (2, 1.0), (1000, 0.5), (1000, 1.0)):
        x = normal(size)
        assert TopK(ratio).encode(x, rng()).tobytes() == x.tobytes()
    assert TopK(0.4).wire_bytes(1000, "float32") == 400 * 8


@pytest.mark.parametrize("codec", [TopK(0.5), TopK(0.3, bucket=8), Threshold(1.0), AdaComp(10)], ids=str)
def test_damaged_indices_are_refused(codec):
    x, refused = normal(40, dtype=np.float64), 0
    data = codec.encode(x, rng())
    assert len(data) < x.nbytes
    for place in range(len(data)):
        for bit in range(8):
            bad = data.copy()
            bad[place] ^= 1 << bit
            try:
                out = codec.decode(bad, 40, "float64")
            except ProtocolError:
                refused += 1
            else:
                assert out.shape == (40,)
    assert refused > 0


def test_damage_is_named():
    def wire(*numbers):
        return np.concatenate([np.array(numbers, "<u4").view(np.uint8), np.zeros(16, np.uint8)])

    for indices in ((5, 3), (3, 3), (3, 40)):
        with pytest.raises(ProtocolError, match="not in ascending order or"):
            TopK(0.05).decode(wire(*indices), 40, "float64")
        with pytest.raises(ProtocolError, match="not in ascending order or"):
            Threshold(1.0).decode(wire(2, *indices), 40, "float64")
    for count in (3, 41, 1 << 31):
        with pytest.raises(ProtocolError, match="threshold"):
            Threshold(1.0).decode(wire(count, 1, 2), 40, "float64")
    out = np.ones(40)
    with pytest.raises(ProtocolError, match="not in ascending order or"):
        TopK(0.05).add_decoded(wire(3, 40), out)
    assert (out == 1).all(), "what is refused adds nothing"


@pytest.mark.parametrize(
    "text", ["topk", "topk(sampled=true)", "topk(bucket=512)", "dgc(warmup=8)", "random_k", "threshold(2.0)", "adacomp"]
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_large_tensors_give_the_bytes_of_large_arrays(text, dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(normal(150_001)).to(getattr(torch, dtype))
    if dtype == "bfloat16":
        import ml_dtypes

        array = tensor.float().numpy().astype(ml_dtypes.bfloat16)
    else:
        array = tensor.numpy()
    codec = Codec.parse(text).bind_step(100)
    data = codec.encode(array, rng(4))
    assert codec.encode(tensor, rng(4)).numpy().tobytes() == data.tobytes()


def test_scaled_random_k_is_damped_under_feedback_and_a_values_codec_may_forbid_it():
    assert str(bound_codec(RandomK(scaled=True), Residual(), ((100,),), 0)).startswith("Damped")

    class Wild(Half):
        @property
        def contraction(self):
            return False

    with pytest.raises(CompositionError, match="residual"):
        check_composition(TopK() + Wild(), Residual())
