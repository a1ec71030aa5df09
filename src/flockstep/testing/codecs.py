"""What every codec promises: its wire size, its round trip, and each capability that its class declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flockstep.arrays.schema import DTYPES, FlatArray
from flockstep.codecs.base import Codec
from flockstep.errors import ProtocolError

SIZES = (0, 1, 2, 3, 7, 8, 33, 256, 1000)
DRAWS = 400
SIGMAS = 6.0
"""How many standard errors a mean over `DRAWS` may be off: chance exceeds it once in 10⁹ elements."""


def check_codec(codec: Codec) -> None:
    """Run every check of this module on one codec, and one for each capability that it declares.

    Raises:
        AssertionError: a promise is broken; the message names it.
    """
    for dtype in DTYPES:
        check_wire_bytes(codec, dtype)
        check_input_untouched(codec, dtype)
        check_repeatable(codec, dtype)
        check_refuses_damage(codec, dtype)
        if codec.lossless:
            check_lossless(codec, dtype)
    if codec.unbiased:
        check_unbiased(codec)
    if codec.linear:
        check_linear(codec)
    if codec.contraction:
        check_contraction(codec)


def samples(dtype: str) -> Iterator[FlatArray]:
    """Finite arrays of every size in `SIZES`: normal, heavy-tailed, one-hot, zero; strided and read-only ones too."""
    random = np.random.default_rng(0)
    for size in SIZES:
        yield random.normal(size=size).astype(dtype)
    yield (random.standard_t(2, size=256) * 0.01).astype(dtype)
    yield np.eye(1, 64, 5, dtype=dtype)[0]
    yield np.zeros(33, dtype)
    yield random.normal(size=64).astype(dtype)[::2]
    locked = random.normal(size=33).astype(dtype)
    locked.flags.writeable = False
    yield locked


def round_trip(codec: Codec, array: FlatArray, seed: int = 0) -> FlatArray:
    """What a receiver sees of `array`."""
    data = codec.encode(array, np.random.default_rng(seed))
    return codec.decode(data, array.size, array.dtype.name)


def check_wire_bytes(codec: Codec, dtype: str) -> None:
    """`wire_bytes` is the exact length of the encoding, a flat array of bytes; decoding keeps size and dtype."""
    for array in samples(dtype):
        what = f"{codec} on {array.size} {dtype}"
        data = codec.encode(array, np.random.default_rng(0))
        assert data.dtype == np.uint8, f"{what}: encoded as {data.dtype}, not as bytes"
        assert data.ndim == 1, f"{what}: encoded in {data.ndim} dimensions"
        promised = codec.wire_bytes(array.size, dtype)
        assert data.size == promised, f"{what}: wire_bytes says {promised}, encode gives {data.size}"
        received = np.frombuffer(data.tobytes(), np.uint8)  # read-only, as it comes off a socket
        decoded = codec.decode(received, array.size, dtype)
        assert decoded.shape == (array.size,), f"{what}: decoded to shape {decoded.shape}"
        assert decoded.dtype == np.dtype(dtype), f"{what}: decoded to {decoded.dtype}"


def check_input_untouched(codec: Codec, dtype: str) -> None:
    """Encoding changes nothing in its input, and changing the input later changes nothing in the encoding."""
    for array in samples(dtype):
        before = array.copy()
        data = codec.encode(array, np.random.default_rng(0))
        kept = data.copy()
        assert _same_bits(array, before), f"{codec} changes the {array.size} {dtype} that it encodes"
        if array.flags.writeable:
            array += 1
        assert np.array_equal(data, kept), f"{codec} hands out the memory of the {array.size} {dtype} that it encodes"


def check_repeatable(codec: Codec, dtype: str) -> None:
    """The same array and the same seed give the same bytes."""
    for array in samples(dtype):
        first, second = (codec.encode(array, np.random.default_rng(3)) for _ in range(2))
        assert np.array_equal(first, second), f"{codec} encodes {array.size} {dtype} differently for the same seed"


def check_refuses_damage(codec: Codec, dtype: str) -> None:
    """A wrong number of bytes is a `ProtocolError`; arbitrary bytes are that or decode to the right shape."""
    random = np.random.default_rng(0)
    for array in samples(dtype):
        data = codec.encode(array, random)
        lengths = {data.size - 1, data.size + 1, 0, 2 * data.size} - {data.size, -1}
        for length in lengths:
            refused = not _decodes(codec, np.resize(data, length), array.size, dtype)
            assert refused, f"{codec} decodes {length} bytes as {array.size} {dtype}, which take {data.size}"
        noise = random.integers(0, 256, data.size, np.uint8)
        _decodes(codec, noise, array.size, dtype)


def check_lossless(codec: Codec, dtype: str) -> None:
    """Every bit comes back, of infinities, NaN and negative zero too."""
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(dtype).tiny, np.finfo(dtype).max], dtype)
    for array in (*samples(dtype), special):
        decoded = round_trip(codec, array)
        assert _same_bits(decoded, array), f"{codec} is declared lossless, but changes {array} ({dtype}) to {decoded}"


def check_unbiased(codec: Codec) -> None:
    """The mean over many seeds is the array, element by element and along it, within the standard error."""
    array = np.random.default_rng(1).normal(size=64)
    draws = np.stack([round_trip(codec, array, seed) for seed in range(DRAWS)])
    # An element that was never hit shows no spread of its own, so it may be as far off as the typical one.
    spread = np.maximum(draws.std(axis=0), np.sqrt(draws.var(axis=0).mean()))
    _require_mean(codec, array, draws, spread)
    along = draws @ array  # a codec that shrinks everything a little shows here
    _require_mean(codec, np.array([array @ array]), along[:, None], along.std())


def _require_mean(codec: Codec, wanted: FlatArray, draws: FlatArray, spread: Any) -> None:
    allowed = SIGMAS * spread / np.sqrt(DRAWS) + 1e-6 * np.abs(wanted)
    off = np.abs(draws.mean(axis=0) - wanted)
    worst = int(np.argmax(off - allowed))
    assert off[worst] <= allowed[worst], (
        f"{codec} is declared unbiased, but over {DRAWS} draws the mean of {wanted[worst]:.6g} is "
        f"{draws.mean(axis=0)[worst]:.6g}, off by more than {allowed[worst]:.2g}"
    )


def check_linear(codec: Codec) -> None:
    """The round trip of a sum is the sum of the round trips, up to rounding."""
    random = np.random.default_rng(2)
    a, b = random.normal(size=(2, 256))
    apart, together = round_trip(codec, a) + round_trip(codec, b), round_trip(codec, a + b)
    off = float(np.abs(apart - together).max())
    assert off <= 1e-6, f"{codec} is declared linear, but a sum's round trip is off the sum of round trips by {off:.3g}"


def check_contraction(codec: Codec) -> None:
    """The mean squared error stays below the squared norm at several scales, and zero stays zero."""
    assert not round_trip(codec, np.zeros(33)).any(), f"{codec} is declared a contraction, but does not keep zero"
    for array in samples("float32"):
        for scale in (1e-3, 1.0, 1e3):
            scaled = (array * scale).astype(np.float64)
            norm = float(np.sum(scaled**2))
            errors = [float(np.sum((scaled - round_trip(codec, scaled, seed)) ** 2)) for seed in range(16)]
            mean = float(np.mean(errors))
            # A random choice of elements may miss a single one in every draw, never half of many.
            enough = mean < norm if np.count_nonzero(scaled) > 1 else mean <= norm
            assert enough, (
                f"{codec} is declared a contraction, but the mean squared error {mean:.3g} of {scaled.size} elements "
                f"is not below their squared norm {norm:.3g}"
            )


def _decodes(codec: Codec, data: FlatArray, size: int, dtype: str) -> bool:
    """Whether `data` is taken; anything but a `ProtocolError` or a well-shaped array is a broken promise."""
    try:
        shape = codec.decode(data, size, dtype).shape
    except ProtocolError:
        return False
    except Exception as error:
        raise AssertionError(
            f"{codec} answers {data.size} damaged bytes with {type(error).__name__}, not ProtocolError: {error}"
        ) from error
    assert shape == (size,), f"{codec} decodes {data.size} damaged bytes to shape {shape} in place of ({size},)"
    return True


def _same_bits(a: FlatArray, b: FlatArray) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
