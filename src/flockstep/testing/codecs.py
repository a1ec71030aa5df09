"""Checks of every codec: wire size, round trip, and each capability that its class declares.

Errors are checked in `flockstep.testing.codec_errors`, feedback in `flockstep.testing.feedback`; `check_codec` runs all
checks.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import Diverged, ProtocolError
from flockstep.testing.codec_errors import check_contraction, check_error_bound, check_linear, check_unbiased
from flockstep.testing.feedback import check_encode_residual
from flockstep.testing.samples import ROUNDING, SHAPES, SMALLEST, exact, same_bits, samples, tensors, wide

ALLOWANCE = 64
"""Number of bytes per tensor by which an encoding may be larger than the array."""
STEP = 7
"""Step of a run to which codecs are bound in the checks."""


def check_codec(codec: Codec) -> None:
    """Run every check on one codec, unbound, and bound to tensors and a step.

    Raises:
        AssertionError: a check fails; the message names the violated rule.
    """
    bound = codec.bind_shapes(SHAPES).bind_step(STEP)
    for dtype in FLOATS:
        for one, arrays, tensor_count in (
            (codec, [*samples(dtype), wide(dtype)], 1),
            (bound, list(tensors(dtype)), len(SHAPES)),
        ):
            check_wire_bytes(one, arrays, tensor_count)
            check_untouched(one, arrays)
            check_repeatable(one, arrays)
            check_refuses_damage(one, arrays)
            check_add_decoded(one, arrays)
            check_encode_residual(one, arrays)
            check_error_bound(one, arrays)
            if one.sparse:
                check_stream(one, arrays)
            if one.lossless:
                check_lossless(one, arrays)
            if one.linear:
                check_linear(one, arrays)
        check_exact_parts(codec, dtype)
        check_not_finite(codec, dtype)
        check_overflow(codec, dtype)
    if codec.unbiased:
        check_unbiased(codec)
    if codec.contraction:
        check_contraction(codec)


def round_trip(codec: Codec, array: FlatArray, seed: int = 0) -> FlatArray:
    """Encode `array`, and return the array that a receiver decodes."""
    data = codec.encode(array, np.random.default_rng(seed))
    return codec.decode(data, array.size, array.dtype.name)


def check_wire_bytes(codec: Codec, arrays: Iterable[FlatArray], tensor_count: int = 1) -> None:
    """Check that `wire_bytes` is the length of the encoding, or its upper limit, and that decoding keeps the size."""
    for array in arrays:
        dtype, what = array.dtype.name, _on(codec, array)
        data = codec.encode(array, np.random.default_rng(0))
        assert data.dtype == np.uint8, f"{what}: encode returns {data.dtype} instead of bytes"
        assert data.ndim == 1, f"{what}: encode returns {data.ndim} dimensions instead of 1"
        promised = codec.wire_bytes(array.size, dtype)
        relation = data.size == promised if codec.exact_size else data.size <= promised
        assert relation, f"{what}: wire_bytes promises {promised} bytes, but encode returns {data.size}"
        limit = array.nbytes + ALLOWANCE * tensor_count
        assert promised <= limit, (
            f"{what}: the encoding takes {promised} bytes, but the array itself only {array.nbytes}; send the array "
            "unencoded"
        )
        received = np.frombuffer(data.tobytes(), np.uint8)  # read-only, as it comes off a socket
        decoded = codec.decode(received, array.size, dtype)
        assert decoded.shape == (array.size,), f"{what}: decoded to shape {decoded.shape}"
        assert decoded.dtype == array.dtype, f"{what}: decoded to {decoded.dtype}"


def check_untouched(codec: Codec, arrays: Iterable[FlatArray]) -> None:
    """Check that encoding leaves its input unchanged, and that the encoding does not depend on later changes of the
    input.
    """
    for array in arrays:
        mine = array.copy()
        data = codec.encode(mine, np.random.default_rng(0))
        kept = data.copy()
        assert same_bits(mine, array), f"{_on(codec, array)}: encode changes the input array"
        mine += numpy_dtype(array.dtype.name).type(1)
        assert np.array_equal(data, kept), f"{_on(codec, array)}: encode returns the memory of the input array"


def check_repeatable(codec: Codec, arrays: Iterable[FlatArray]) -> None:
    """Check that equal arrays and seeds give equal bytes, regardless of the array's memory layout."""
    for array in arrays:
        first, second = (codec.encode(array, np.random.default_rng(3)) for _ in range(2))
        assert np.array_equal(first, second), f"{_on(codec, array)}: encodings with the same seed differ"
        flat = codec.encode(array.reshape(-1).copy(), np.random.default_rng(3))
        assert np.array_equal(first, flat), f"{_on(codec, array)}: the encoding depends on how the array lies in memory"


def check_refuses_damage(codec: Codec, arrays: Iterable[FlatArray]) -> None:
    """Check that a wrong number of bytes raises `ProtocolError`.

    Arbitrary bytes must raise `ProtocolError` or decode to an array of the right shape.
    """
    random = np.random.default_rng(0)
    for array in arrays:
        dtype = array.dtype.name
        data = codec.encode(array, random)
        lengths = {data.size - 1, data.size + 1, 0, 2 * data.size} - {data.size, -1}
        if not codec.exact_size:
            lengths.discard(array.nbytes)  # the uncompressed array
        for length in lengths:
            taken = decodes(codec, np.resize(data, length), array.size, dtype)
            assert not taken, (
                f"{codec} decodes {length} bytes as {array.size} elements of {dtype}, which take {data.size} bytes"
            )
        decodes(codec, random.integers(0, 256, data.size, np.uint8), array.size, dtype)
        decodes(codec, np.full(data.size, 255, np.uint8), array.size, dtype)


def check_add_decoded(codec: Codec, arrays: Iterable[FlatArray]) -> None:
    """Check that `add_decoded` equals decoding and adding, up to the last digit, and refuses the same bytes as
    `decode`.
    """
    for array in arrays:
        dtype = array.dtype.name
        data = codec.encode(array, np.random.default_rng(5))
        decoded = exact(codec.decode(data, array.size, dtype))
        before = (np.random.default_rng(6).normal(size=array.size) * np.abs(exact(array))).astype(array.dtype)
        for scale in (1.0, 0.5, -3.0):
            out = before.copy()
            codec.add_decoded(data, out, scale)
            wanted = exact(before) + scale * decoded
            allowed = 4 * ROUNDING[dtype] * (np.abs(exact(before)) + np.abs(scale * decoded)) + 2 * SMALLEST[dtype]
            off = np.abs(exact(out) - wanted)
            assert (off <= allowed).all(), (
                f"{_on(codec, array)}: add_decoded with scale {scale} gives "
                f"{exact(out)[np.argmax(off - allowed)]:.9g} instead of {wanted[np.argmax(off - allowed)]:.9g}"
            )
        damaged = np.resize(data, data.size + 1)
        if decodes(codec, damaged, array.size, dtype):
            continue
        try:
            codec.add_decoded(damaged, before.copy())
        except ProtocolError:
            continue
        raise AssertionError(f"{_on(codec, array)}: add_decoded accepts {damaged.size} bytes that decode refuses")


def check_stream(codec: Codec, arrays: Iterable[FlatArray]) -> None:
    """Check that `stream` returns ascending indices, and the values that decoding puts at these indices; all other
    elements must be zero.
    """
    for array in arrays:
        dtype, what = array.dtype.name, _on(codec, array)
        data = codec.encode(array, np.random.default_rng(2))
        indices, values = codec.stream(data, array.size, dtype)
        assert indices.dtype == np.uint32, f"{what}: stream returns indices of dtype {indices.dtype} instead of uint32"
        assert len(indices) == len(values), f"{what}: stream returns {len(indices)} indices, but {len(values)} values"
        ascending = (np.diff(indices.astype(np.int64)) > 0).all()
        assert ascending, f"{what}: stream returns indices that are not in ascending order"
        assert not len(indices) or indices[-1] < array.size, f"{what}: stream names element {indices[-1]}"
        filled = np.zeros(array.size, array.dtype)
        filled[indices] = values
        decoded = codec.decode(data, array.size, dtype)
        assert (filled == decoded).all(), f"{what}: the values from stream differ from those of decode"
        damaged = np.resize(data, data.size + 1)
        if not decodes(codec, damaged, array.size, dtype):
            try:
                codec.stream(damaged, array.size, dtype)
            except ProtocolError:
                continue
            raise AssertionError(f"{what}: stream accepts {damaged.size} bytes that decode refuses")


def check_lossless(codec: Codec, arrays: Iterable[FlatArray]) -> None:
    """Check that the decoded array equals the original bit for bit."""
    for array in arrays:
        decoded = round_trip(codec, array)
        same = same_bits(decoded, array.reshape(-1))
        assert same, f"{_on(codec, array)}: declared lossless, but changes {array} to {decoded}"


def check_exact_parts(codec: Codec, dtype: str) -> None:
    """Check that the elements in `exact_parts` arrive bit for bit, with and without binding to tensors."""
    for one, arrays in ((codec, samples(dtype)), (codec.bind_shapes(SHAPES), tensors(dtype))):
        for array in arrays:
            decoded, flat = round_trip(one, array), array.reshape(-1)
            for part in one.exact_parts(array.size):
                same = same_bits(decoded[part], flat[part])
                assert same, (
                    f"{_on(one, array)}: elements {part.start} to {part.stop - 1} change, although the codec "
                    "sends them exactly"
                )


def check_not_finite(codec: Codec, dtype: str) -> None:
    """Check that NaN and infinities arrive in place, or are refused with a `Diverged` that names value and element.

    A codec that selects elements independently of their values may leave them out.
    """
    for value in (np.nan, np.inf, -np.inf):
        for size, place in ((1, 0), (33, 17), (1000, 999)):
            array = np.random.default_rng(8).normal(size=size).astype(numpy_dtype(dtype))
            array[place] = value
            what = f"{codec} on {size} {dtype}, {value} at {place}"
            refusal, decoded = "", np.zeros(size)
            try:
                decoded = exact(round_trip(codec, array))
            except Diverged as error:
                refusal = str(error)
            if refusal:
                named = str(value) in refusal and f"element {place}" in refusal
                assert named, f"{what}: the Diverged error does not name 'element {place}' and {value}: {refusal}"
                continue
            kept = np.array_equal(decoded[place], value, equal_nan=True)
            array[place] = 1000
            left_out = decoded[place] == 0 == exact(round_trip(codec, array))[place]
            assert kept or left_out, f"{what}: decoded to {decoded[place]} instead of raising Diverged"


def check_overflow(codec: Codec, dtype: str) -> None:
    """Check that the dtype's largest numbers arrive, possibly as infinities, or are refused with a `Diverged`."""
    largest = np.full(65, np.ldexp(2 - 2 * ROUNDING[dtype], _TOP[dtype])).astype(numpy_dtype(dtype))
    try:
        with np.errstate(over="ignore"):
            decoded = exact(round_trip(codec, largest))
    except Diverged:
        return
    assert not np.isnan(decoded).any(), (
        f"{codec} decodes the largest numbers of {dtype} to NaN; saturate, or raise Diverged"
    )


_TOP = {"float16": 15, "bfloat16": 127, "float32": 127, "float64": 1023}


def decodes(codec: Codec, data: Bytes, size: int, dtype: str) -> bool:
    """Return whether the codec decodes `data`; False if it raises `ProtocolError`.

    Any result other than a `ProtocolError` or an array of the right shape fails the check.
    """
    what = f"{codec}, given {data.size} damaged bytes for {size} elements of {dtype},"
    try:
        with np.errstate(all="ignore"):  # arbitrary bytes may decode to any number
            decoded = codec.decode(data, size, dtype)
    except ProtocolError:
        return False
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__} instead of ProtocolError: {error}") from error
    assert decoded.shape == (size,), f"{what} decodes to shape {decoded.shape} instead of ({size},)"
    assert decoded.dtype == numpy_dtype(dtype), f"{what} decodes to {decoded.dtype}"
    return True


def _on(codec: Codec, array: FlatArray) -> str:
    return f"{codec} on {array.shape if array.ndim != 1 else array.size} {array.dtype.name}"
