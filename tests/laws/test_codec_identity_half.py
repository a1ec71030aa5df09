"""Identity and half to the byte, feedback residual and none, and codec and feedback joined."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from flockstep.codecs.half import Half
from flockstep.codecs.identity import Identity
from flockstep.errors import CompositionError
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.residual import Residual
from flockstep.feedback.sender import check_composition
from flockstep.testing.codecs import check_codec
from flockstep.testing.feedback import check_nothing_lost
from support.codecs import rng

floats32 = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32))


@pytest.mark.oracle("codec:identity")
@given(floats32)
def test_identity_keeps_every_bit(array):
    data = Identity().encode(array, rng())
    assert Identity().decode(data, array.size, "float32").tobytes() == array.tobytes()


@pytest.mark.oracle("codec:half")
@given(floats32)
def test_half_is_numpys_rounding_but_saturates(array):
    decoded = Half().decode(Half().encode(array, rng()), array.size, "float32")
    with np.errstate(over="ignore"):
        rounded = array.astype(np.float16).astype(np.float32)
    saturated = np.isfinite(array) & ~np.isfinite(rounded)
    assert np.array_equal(decoded[~saturated], rounded[~saturated], equal_nan=True)
    assert np.array_equal(decoded[saturated], np.copysign(np.float32(65504), array[saturated]))


@pytest.mark.parametrize("codec", [Identity(), Half()])
def test_the_wire_is_little_endian(codec):
    big = np.array([1.0, 2.0], ">f4")
    assert codec.encode(big, rng()).tobytes() == codec.encode(big.astype("<f4"), rng()).tobytes()


def test_golden_bytes():
    one = np.array([1.0, -2.0], np.float32)
    assert Identity().encode(one, rng()).tobytes().hex() == "0000803f000000c0"
    assert Half().encode(one, rng()).tobytes().hex() == "003c00c0"


@pytest.mark.oracle("feedback:residual")
def test_residual_loses_nothing():
    feedback, codec, error = Residual(), Half(), None
    sent = np.zeros(50)
    wanted = np.zeros(50)
    for step in range(30):
        gradient = (rng(step).normal(size=50) * 10.0 ** rng(step).integers(-9, 1, 50)).astype(np.float32)
        before = gradient if error is None else error + gradient
        data, error = feedback.encode(codec, gradient, error, rng())
        decoded = codec.decode(data, 50, "float32")
        assert (decoded + error).tobytes() == before.tobytes(), f"q + e differs from p at step {step}"
        sent += decoded
        wanted += gradient
    assert np.allclose(sent + error, wanted, rtol=0, atol=1e-5)
    assert np.abs(sent - wanted).max() > 0


def test_residual_refuses_what_is_no_contraction():
    class Expands(Half):
        contraction: ClassVar[bool] = False

    check_composition(Expands(), NoFeedback())
    with pytest.raises(CompositionError, match=r"feedback residual needs .*, got Expands.*; use feedback none"):
        check_composition(Expands(), Residual())


@pytest.mark.oracle("feedback:none")
def test_no_feedback_keeps_nothing():
    data, error = NoFeedback().encode(Half(), np.float32([0.1]), None, rng())
    assert error is None
    assert data.size == 2


class Truncates(Half):
    """Wrong codec: rounds toward zero instead of to the nearest value."""

    def encode(self, array, random):
        nearest = np.frombuffer(super().encode(array, random), np.float16)
        off = np.abs(nearest.astype(np.float64)) > np.abs(array.reshape(-1).astype(np.float64))
        return np.where(off, np.nextafter(nearest, np.float16(0)), nearest).view(np.uint8)


class LosesSign(Identity):
    """Wrong codec: negative zero becomes positive zero."""

    def encode(self, array, random):
        return super().encode(array + array.dtype.type(0), random)


@pytest.mark.negative_control("codec:half", "codec:identity")
def test_a_broken_rounding_and_a_lost_sign_are_caught():
    with pytest.raises(AssertionError, match="error_bound promises"):
        check_codec(Truncates())
    array = np.float32([-0.0])
    assert LosesSign().decode(LosesSign().encode(array, rng()), 1, "float32").tobytes() != array.tobytes()


class Forgets(Residual):
    """Wrong feedback: drops a tenth of the error in every step."""

    def encode(self, codec, array, memory, random):
        data, error = super().encode(codec, array, memory, random)
        return data, error * np.float32(0.9)


class Keeps(NoFeedback):
    """Wrong feedback: keeps an error that the codec has already sent."""

    def encode(self, codec, array, memory, random):
        return codec.encode(array if memory is None else array + memory, random), array


@pytest.mark.negative_control("feedback:residual", "feedback:none")
def test_a_feedback_that_forgets_or_keeps_is_caught():
    check_nothing_lost(Residual(), Coarse())
    with pytest.raises(AssertionError, match="loses"):
        check_nothing_lost(Forgets(), Coarse())
    data, memory = Keeps().encode(Half(), np.float32([0.1]), None, rng())
    assert memory is not None
    again, _ = Keeps().encode(Half(), np.float32([0.1]), memory, rng())
    assert again.tobytes() != data.tobytes()


class Coarse(Half):
    """Wrong codec: keeps sign and exponent only."""

    def encode(self, array, random):
        return super().encode(np.sign(array) * np.exp2(np.floor(np.log2(np.abs(array) + 1e-30))), random)
