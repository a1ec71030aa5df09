"""Checks of every codec: wire size, round trip, and each capability that its class declares.

Errors are checked in `flockstep.testing.codec_errors`, feedback in `flockstep.testing.feedback`; `check_codec` runs all
checks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import Diverged, ProtocolError
from flockstep.testing.codec_errors import check_contraction, check_error_bound, check_linear, check_unbiased
from flockstep.testing.samples import ROUNDING, SHAPES, SMALLEST, exact, same_bits, samples, tensors, wide

ALLOWANCE = 64
"""Number of bytes per tensor by which an encoding may be larger than the array."""
STEP = 7
"""Step of a run to which codecs are bound in the checks."""
_TOP = {"float16": 15, "bfloat16": 127, "float32": 127, "float64": 1023}


class CodecCase(NamedTuple):
    """A codec and an array that the codec encodes."""

    codec: Codec
    array: FlatArray
    tensor_count: int = 1
    """Number of tensors that the array concatenates."""

    def __str__(self) -> str:
        return f"{self.codec} on {self.array.shape if self.array.ndim != 1 else self.array.size} {self.dtype}"

    @property
    def dtype(self) -> str:
        """Name of the array's dtype."""
        return self.array.dtype.name

    def encode(self, seed: int = 0) -> Bytes:
        """Encode the array with random numbers of a seed."""
        return self.codec.encode(self.array, np.random.default_rng(seed))

    def decode(self, data: Bytes) -> FlatArray:
        """Return the array that a receiver decodes."""
        return self.codec.decode(data, self.array.size, self.dtype)

    def require_size(self, data: Bytes, method: str) -> int:
        """Check that `wire_bytes` is the length of an encoding, or its upper limit; return `wire_bytes`."""
        promised = self.codec.wire_bytes(self.array.size, self.dtype)
        relation = data.size == promised if self.codec.exact_size else data.size <= promised
        assert relation, f"{self}: wire_bytes promises {promised} bytes, but {method} returns {data.size}"
        return promised

    def decodes(self, data: Bytes) -> bool:
        """Return whether the codec decodes `data`; False if it raises `ProtocolError`.

        Any result other than a `ProtocolError` or an array of the right shape fails the check.
        """
        size, dtype = self.array.size, self.dtype
        what = f"{self.codec}, given {data.size} damaged bytes for {size} elements of {dtype},"
        try:
            with np.errstate(all="ignore"):  # arbitrary bytes may decode to any number
                decoded = self.decode(data)
        except ProtocolError:
            return False
        except Exception as error:
            raise AssertionError(f"{what} raises {type(error).__name__} instead of ProtocolError: {error}") from error
        assert decoded.shape == (size,), f"{what} decodes to shape {decoded.shape} instead of ({size},)"
        assert decoded.dtype == numpy_dtype(dtype), f"{what} decodes to {decoded.dtype}"
        return True

    def require_refused(self, data: Bytes, method: str, call: Callable[[Bytes], Any]) -> None:
        """Check that another method refuses bytes of a wrong length that `decode` refuses."""
        damaged = np.resize(data, data.size + 1)
        if self.decodes(damaged):
            return
        try:
            call(damaged)
        except ProtocolError:
            return
        raise AssertionError(f"{self}: {method} accepts {damaged.size} bytes that decode refuses")


def check_codec(codec: Codec) -> None:
    """Run every check on one codec, unbound, and bound to tensors and a step.

    Raises:
        AssertionError: a check fails; the message names the violated rule.
    """
    bound = codec.bind_shapes(SHAPES).bind_step(STEP)
    checks = [check_wire_bytes, check_untouched, check_repeatable, check_refuses_damage, check_add_decoded]
    checks += [check_encode_residual, lambda case: check_error_bound(case.codec, case.array)]
    if codec.sparse:
        checks.append(check_stream)
    if codec.lossless:
        checks.append(check_lossless)
    if codec.linear:
        checks.append(lambda case: check_linear(case.codec, case.array))
    for dtype in FLOATS:
        cases = [CodecCase(codec, array) for array in (*samples(dtype), wide(dtype))]
        cases += [CodecCase(bound, array, len(SHAPES)) for array in tensors(dtype)]
        for check in checks:  # a broken promise shows in the first check that is about it
            for case in cases:
                check(case)
        check_exact_parts(codec, dtype)
        check_not_finite(codec, dtype)
        check_overflow(codec, dtype)
    if codec.unbiased:
        check_unbiased(codec)
    if codec.contraction:
        check_contraction(codec)


def check_wire_bytes(case: CodecCase) -> None:
    """Check that `wire_bytes` is the length of the encoding, or its upper limit, and that decoding keeps the size."""
    data, array = case.encode(), case.array
    assert data.dtype == np.uint8, f"{case}: encode returns {data.dtype} instead of bytes"
    assert data.ndim == 1, f"{case}: encode returns {data.ndim} dimensions instead of 1"
    promised = case.require_size(data, "encode")
    assert promised <= array.nbytes + ALLOWANCE * case.tensor_count, (
        f"{case}: the encoding takes {promised} bytes, but the array itself only {array.nbytes}; send the array "
        "unencoded"
    )
    decoded = case.decode(np.frombuffer(data.tobytes(), np.uint8))  # read-only, as it comes off a socket
    assert decoded.shape == (array.size,), f"{case}: decoded to shape {decoded.shape}"
    assert decoded.dtype == array.dtype, f"{case}: decoded to {decoded.dtype}"


def check_untouched(case: CodecCase) -> None:
    """Check that encoding leaves its input unchanged, and that the encoding does not depend on later changes of the
    input.
    """
    mine = case.array.copy()
    data = case.codec.encode(mine, np.random.default_rng(0))
    kept = data.copy()
    assert same_bits(mine, case.array), f"{case}: encode changes the input array"
    mine += numpy_dtype(case.dtype).type(1)
    assert np.array_equal(data, kept), f"{case}: encode returns the memory of the input array"


def check_repeatable(case: CodecCase) -> None:
    """Check that equal arrays and seeds give equal bytes, regardless of the array's memory layout."""
    first = case.encode(3)
    assert np.array_equal(first, case.encode(3)), f"{case}: encodings with the same seed differ"
    flat = case._replace(array=case.array.reshape(-1).copy()).encode(3)
    assert np.array_equal(first, flat), f"{case}: the encoding depends on how the array lies in memory"


def check_refuses_damage(case: CodecCase) -> None:
    """Check that a wrong number of bytes raises `ProtocolError`.

    Arbitrary bytes must raise `ProtocolError` or decode to an array of the right shape.
    """
    random, data = np.random.default_rng(0), case.encode()
    lengths = {data.size - 1, data.size + 1, 0, 2 * data.size} - {data.size, -1}
    if not case.codec.exact_size:
        lengths.discard(case.array.nbytes)  # the uncompressed array
    for length in lengths:
        assert not case.decodes(np.resize(data, length)), (
            f"{case.codec} decodes {length} bytes as {case.array.size} elements of {case.dtype}, which take "
            f"{data.size} bytes"
        )
    case.decodes(random.integers(0, 256, data.size, np.uint8))
    case.decodes(np.full(data.size, 255, np.uint8))


def check_add_decoded(case: CodecCase) -> None:
    """Check that `add_decoded` equals decoding and adding, up to the last digit, and refuses the same bytes as
    `decode`.
    """
    data, array, codec = case.encode(5), case.array, case.codec
    decoded = exact(case.decode(data))
    before = (np.random.default_rng(6).normal(size=array.size) * np.abs(exact(array))).astype(array.dtype)
    for scale in (1.0, 0.5, -3.0):
        out = before.copy()
        codec.add_decoded(data, out, scale)
        wanted = exact(before) + scale * decoded
        allowed = 4 * ROUNDING[case.dtype] * (np.abs(exact(before)) + np.abs(scale * decoded))
        allowed += 2 * SMALLEST[case.dtype]
        off = np.abs(exact(out) - wanted)
        assert (off <= allowed).all(), (
            f"{case}: add_decoded with scale {scale} gives "
            f"{exact(out)[np.argmax(off - allowed)]:.9g} instead of {wanted[np.argmax(off - allowed)]:.9g}"
        )
    case.require_refused(data, "add_decoded", lambda damaged: codec.add_decoded(damaged, before.copy()))


def check_encode_residual(case: CodecCase) -> None:
    """Check that the decoded array and the stored error add up to the previous error plus the array, up to the last
    digit.

    Two cases hold bit for bit: no error is stored for an element that is decoded exactly, and an element that is not
    sent is stored whole.
    """
    array, dtype = case.array, case.dtype
    error = (np.random.default_rng(7).normal(size=array.size) * exact(array)).astype(array.dtype)
    before, flat, mine = error.copy(), array.reshape(-1), array.copy()
    total = before + flat
    data = case.codec.encode_residual(mine, error, np.random.default_rng(5))
    assert same_bits(mine, array), f"{case}: encode_residual changes the input array"
    case.require_size(data, "encode_residual")
    decoded = case.decode(data)
    copied = decoded == total
    assert not error[copied].any(), (
        f"{case}: keeps an error of {error[copied][np.argmax(error[copied] != 0)]} for an element that is sent exactly"
    )
    unsent = (decoded == 0) & ~copied
    assert (error[unsent] == total[unsent]).all(), (
        f"{case}: the kept error of an element that is not sent differs from the element"
    )
    wanted, found = exact(before) + exact(flat), exact(decoded) + exact(error)
    allowed = sum(np.abs(exact(one)) for one in (before, flat, decoded, error))
    off = np.abs(found - wanted)
    assert (off <= 2 * ROUNDING[dtype] * allowed + SMALLEST[dtype]).all(), (
        f"{case}: encode_residual loses part of a value: decoded + error is {found[np.argmax(off)]:.9g} instead of "
        f"{wanted[np.argmax(off)]:.9g}"
    )


def check_stream(case: CodecCase) -> None:
    """Check that `stream` returns ascending indices, and the values that decoding puts at these indices; all other
    elements must be zero.
    """
    data, size = case.encode(2), case.array.size
    indices, values = case.codec.stream(data, size, case.dtype)
    assert indices.dtype == np.uint32, f"{case}: stream returns indices of dtype {indices.dtype} instead of uint32"
    assert len(indices) == len(values), f"{case}: stream returns {len(indices)} indices, but {len(values)} values"
    ascending = (np.diff(indices.astype(np.int64)) > 0).all()
    assert ascending, f"{case}: stream returns indices that are not in ascending order"
    assert not len(indices) or indices[-1] < size, f"{case}: stream names element {indices[-1]}"
    filled = np.zeros(size, case.array.dtype)
    filled[indices] = values
    assert (filled == case.decode(data)).all(), f"{case}: the values from stream differ from those of decode"
    case.require_refused(data, "stream", lambda damaged: case.codec.stream(damaged, size, case.dtype))


def check_lossless(case: CodecCase) -> None:
    """Check that the decoded array equals the original bit for bit."""
    decoded = case.decode(case.encode())
    same = same_bits(decoded, case.array.reshape(-1))
    assert same, f"{case}: declared lossless, but changes {case.array} to {decoded}"


def check_exact_parts(codec: Codec, dtype: str) -> None:
    """Check that the elements in `exact_parts` arrive bit for bit, with and without binding to tensors."""
    cases = [CodecCase(codec, array) for array in samples(dtype)]
    for case in [*cases, *(CodecCase(codec.bind_shapes(SHAPES), array) for array in tensors(dtype))]:
        decoded, flat = case.decode(case.encode()), case.array.reshape(-1)
        for part in case.codec.exact_parts(flat.size):
            same = same_bits(decoded[part], flat[part])
            assert same, (
                f"{case}: elements {part.start} to {part.stop - 1} change, although the codec sends them exactly"
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
            case, refusal, decoded = CodecCase(codec, array), "", np.zeros(size)
            try:
                decoded = exact(case.decode(case.encode()))
            except Diverged as error:
                refusal = str(error)
            if refusal:
                named = str(value) in refusal and f"element {place}" in refusal
                assert named, f"{what}: the Diverged error does not name 'element {place}' and {value}: {refusal}"
                continue
            kept = np.array_equal(decoded[place], value, equal_nan=True)
            array[place] = 1000
            left_out = decoded[place] == 0 == exact(case.decode(case.encode()))[place]
            assert kept or left_out, f"{what}: decoded to {decoded[place]} instead of raising Diverged"


def check_overflow(codec: Codec, dtype: str) -> None:
    """Check that the dtype's largest numbers arrive, possibly as infinities, or are refused with a `Diverged`."""
    largest = np.full(65, np.ldexp(2 - 2 * ROUNDING[dtype], _TOP[dtype])).astype(numpy_dtype(dtype))
    try:
        with np.errstate(over="ignore"):
            decoded = exact(CodecCase(codec, largest).decode(CodecCase(codec, largest).encode()))
    except Diverged:
        return
    assert not np.isnan(decoded).any(), (
        f"{codec} decodes the largest numbers of {dtype} to NaN; saturate, or raise Diverged"
    )
