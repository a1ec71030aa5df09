"""Any bytes, to every decoder: a typed error or a valid array, in bounded memory."""

from __future__ import annotations

import tracemalloc
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flockstep import registry
from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.codecs.base import Codec
from flockstep.codecs.half import Half
from flockstep.errors import ProtocolError
from flockstep_lab.damage import check_any_bytes

SIZES = st.sampled_from([0, 1, 2, 7, 33, 256, 1000])
many = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


@cache
def warmed(name: str) -> Codec:
    """The codec, compiled: what a compiler takes in memory is not the decoder's."""
    codec = Codec.parse(name)
    for dtype in FLOATS:
        array = np.arange(1, 9).astype(numpy_dtype(dtype))
        check_any_bytes(codec, codec.encode(array, np.random.default_rng(0)).tobytes(), 8, dtype, measured=False)
    return codec


@pytest.mark.parametrize("name", registry.names("codec"))
@given(data=st.binary(max_size=300), size=SIZES, dtype=st.sampled_from(FLOATS))
@many
def test_any_bytes_are_refused_or_an_array(name: str, data: bytes, size: int, dtype: str) -> None:
    check_any_bytes(warmed(name), data, size, dtype)


@pytest.mark.parametrize("name", registry.names("codec"))
@given(seed=st.integers(0, 2**16), size=SIZES, dtype=st.sampled_from(FLOATS), other=SIZES, damage=st.data())
@many
def test_damaged_encodings_are_refused_or_an_array(
    name: str, seed: int, size: int, dtype: str, other: int, damage: st.DataObject
) -> None:
    """Bytes that are nearly right reach further than bytes from nowhere."""
    codec, random = warmed(name), np.random.default_rng(seed)
    good = codec.encode(random.normal(size=size).astype(numpy_dtype(dtype)), random).tobytes()
    assert check_any_bytes(codec, good, size, dtype), "a sound encoding is refused"
    bad = bytearray(good)
    for _ in range(damage.draw(st.integers(1, 4))):
        if bad:
            bad[damage.draw(st.integers(0, min(len(bad), 40) - 1))] = damage.draw(st.integers(0, 255))
    check_any_bytes(codec, bytes(bad), size, dtype)
    check_any_bytes(codec, bytes(bad), other, dtype)
    check_any_bytes(codec, bytes(bad[: damage.draw(st.integers(0, len(bad)))]), size, dtype)


@pytest.mark.parametrize("name", registry.names("codec"))
def test_a_few_bytes_that_announce_much_take_little(name: str) -> None:
    codec = warmed(name)
    for data in (b"", b"\xff" * 16, b"\xff" * 64, b"\0" * 64):
        tracemalloc.start()
        try:
            codec.decode(np.frombuffer(data, np.uint8), 1 << 20, "float32")
        except ProtocolError:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak <= 12 * (4 << 20) + (1 << 18)


class Trusts(Half):
    """Wrong codec: allocates as much memory as the bytes announce."""

    def decode(self, data, size, dtype):
        if len(data) >= 4:
            np.zeros(int.from_bytes(data[:3].tobytes(), "big"))
        return super().decode(data, size, dtype)


class Reaches(Half):
    """Wrong codec: uses an index without checking it."""

    def decode(self, data, size, dtype):
        out = np.zeros(size, numpy_dtype(dtype))
        out[data.astype(int)] = 1
        return out


def test_a_decoder_that_trusts_its_bytes_is_caught() -> None:
    with pytest.raises(AssertionError, match="bytes of memory"):
        check_any_bytes(Trusts(), b"\xff" * 20, 10, "float32")
    with pytest.raises(IndexError, match="index 255 is out of bounds"):
        check_any_bytes(Reaches(), b"\xff" * 20, 10, "float32")
