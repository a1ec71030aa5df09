"""Quantizing codecs at the edges: what is not finite, extremes, damaged bytes, and tensors beside arrays."""

from __future__ import annotations

import numpy as np
import pytest

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.codecs.bfloat16 import Bfloat16
from flockstep.codecs.int8 import Int8
from flockstep.codecs.natural import Natural
from flockstep.codecs.one_bit import OneBit
from flockstep.codecs.qsgd import Qsgd
from flockstep.codecs.sign import Sign
from flockstep.codecs.terngrad import TernGrad
from flockstep.errors import Diverged, ProtocolError
from support.codecs import rng

pytest.importorskip("numba")

CODECS = [Int8(), Int8(stochastic=True), OneBit(), Sign(), Sign(scaled=False), TernGrad(), Qsgd(), Natural()]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_what_is_not_finite_with_a_residual_is_named(codec):
    x = rng().normal(size=1500).astype(np.float32)
    x[1234] = np.nan
    with pytest.raises(Diverged, match=r"cannot encode nan at element 1234 with \w+; lower the learning rate"):
        codec.encode_residual(x, np.zeros_like(x), rng())


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_smallest_numbers_do_not_overflow(codec, dtype):
    x = np.full(64, 1, numpy_dtype(dtype)) * numpy_dtype(dtype).type(2.0 ** (-24 if dtype == "float16" else -130))
    decoded = codec.decode(codec.encode(x, rng()), 64, dtype).astype(np.float64)
    assert np.isfinite(decoded).all()


@pytest.mark.parametrize("codec", [Int8(), OneBit(), Sign(), TernGrad(), Qsgd()], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_impossible_scales_are_refused(codec, dtype, scale):
    x = rng().normal(size=100).astype(dtype)
    data = codec.encode(x, rng()).copy()
    data[: x.itemsize] = np.array([scale], dtype).view(np.uint8)
    for act in (lambda: codec.decode(data, 100, dtype), lambda: codec.add_decoded(data, x.copy())):
        with pytest.raises(ProtocolError, match="impossible scales or codes"):
            act()


def test_a_positive_mean_of_the_negative_side_is_refused():
    data = OneBit().encode(rng().normal(size=100).astype(np.float32), rng()).copy()
    data[4:8] = np.float32([1]).view(np.uint8)
    with pytest.raises(ProtocolError, match="one_bit got impossible scales or codes"):
        OneBit().decode(data, 100, "float32")


@pytest.mark.parametrize("codec", [Int8(), TernGrad(), Qsgd(), Natural()], ids=str)
def test_impossible_codes_are_refused(codec):
    x = rng().normal(size=100).astype(np.float32)
    data = codec.encode(x, rng()).copy()
    data[60 if isinstance(codec, Natural) else -5] = 255
    for act in (lambda: codec.decode(data, 100, "float32"), lambda: codec.add_decoded(data, x.copy())):
        with pytest.raises(ProtocolError, match="impossible scales or codes"):
            act()


@pytest.mark.parametrize("codec", [*CODECS, Bfloat16()], ids=str)
def test_a_wrong_length_names_both_numbers(codec):
    wanted = codec.wire_bytes(100, "float32")
    with pytest.raises(ProtocolError, match=rf"needs {wanted} bytes for 100 .*got {wanted + 1}"):
        codec.decode(np.zeros(wanted + 1, np.uint8), 100, "float32")


@pytest.mark.parametrize(
    "codec", [*CODECS, OneBit().bind_shapes([(30, 20), (33,)]), TernGrad().bind_shapes([(600,), (33,)])], ids=str
)
def test_bytes_may_lie_anywhere(codec):
    x = rng().normal(size=633).astype(np.float32)
    data = codec.encode(x, rng())
    shifted = np.frombuffer(b"." + data.tobytes(), np.uint8)[1:]
    assert np.array_equal(codec.decode(shifted, 633, "float32"), codec.decode(data, 633, "float32"))
    out, plain = np.zeros((633, 2), np.float32)[:, 0], np.zeros(633, np.float32)
    codec.add_decoded(shifted, out, 0.5)
    codec.add_decoded(data, plain, 0.5)
    assert np.array_equal(out, plain)
