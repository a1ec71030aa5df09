"""Checks of every codec: wire size, round trip, each capability that its class declares, errors, and tensors.

Means over random encodings must agree within four standard errors. A mean that does not agree is computed again over
four times as many draws, so that a correct codec fails by chance only about once in a billion means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import Diverged, ProtocolError
from flockstep.testing.samples import (
    ROUNDING,
    SHAPES,
    SMALLEST,
    equal_bits,
    exact,
    require_close,
    samples,
    tensors,
    wide,
)

ALLOWANCE = 64
"""Number of bytes per tensor by which an encoding may be larger than the array."""
STEP = 7
"""Step of a run to which codecs are bound in the checks."""
DRAWS = 400
FEW = 24
"""Number of random encodings for checks that only test an upper bound."""
SIGMAS = 4.0
NEAR = 256
"""Largest error of a decoded tensor, in rounding units, for codecs without a fixed order of summation."""
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
        """Return whether the codec decodes `data` to the right shape; False if it raises `ProtocolError`."""
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
    checks += [check_encode_residual, check_error_bound]
    checks += [check_stream] if codec.sparse else []
    checks += [check_linear] if codec.linear else []
    checks += [check_exact_parts]
    for dtype in FLOATS:
        cases = [CodecCase(codec, array) for array in (*samples(dtype), wide(dtype))]
        cases += [CodecCase(bound, array, len(SHAPES)) for array in tensors(dtype)]
        for check in checks:  # a broken promise shows in the first check that is about it
            for case in cases:
                check(case)
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
    """Check that encoding leaves its input unchanged, and keeps no view of it."""
    mine = case.array.copy()
    data = case.codec.encode(mine, np.random.default_rng(0))
    kept = data.copy()
    assert equal_bits(mine, case.array), f"{case}: encode changes the input array"
    mine += numpy_dtype(case.dtype).type(1)
    assert np.array_equal(data, kept), f"{case}: encode returns the memory of the input array"


def check_repeatable(case: CodecCase) -> None:
    """Check that equal arrays and seeds give equal bytes, regardless of the array's memory layout."""
    first = case.encode(3)
    assert np.array_equal(first, case.encode(3)), f"{case}: encodings with the same seed differ"
    flat = case._replace(array=case.array.reshape(-1).copy()).encode(3)
    assert np.array_equal(first, flat), f"{case}: the encoding depends on how the array lies in memory"


def check_refuses_damage(case: CodecCase) -> None:
    """Check that a wrong number of bytes is refused, and any other damage refused or decoded to the right shape."""
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
    """Check that `add_decoded` equals decoding and adding up to the last digit, and refuses what `decode` refuses."""
    data, array = case.encode(5), case.array
    decoded = exact(case.decode(data))
    before = (np.random.default_rng(6).normal(size=array.size) * np.abs(exact(array))).astype(array.dtype)
    for scale in (1.0, 0.5, -3.0):
        out = before.copy()
        case.codec.add_decoded(data, out, scale)
        wanted, operands = exact(before) + scale * decoded, np.abs(exact(before)) + np.abs(scale * decoded)
        require_close(f"{case}: add_decoded with scale {scale}", case.dtype, out, wanted, operands)
    case.require_refused(data, "add_decoded", lambda damaged: case.codec.add_decoded(damaged, before.copy()))


def check_encode_residual(case: CodecCase) -> None:
    """Check that the decoded array and the stored error add up to the previous error plus the array, up to the last
    digit.

    Two cases hold bit for bit: no error is stored for an element that is decoded exactly, and an element that is not
    sent is stored whole.
    """
    array = case.array
    error = (np.random.default_rng(7).normal(size=array.size) * exact(array)).astype(array.dtype)
    before, flat, mine = error.copy(), array.reshape(-1), array.copy()
    total = before + flat
    data = case.codec.encode_residual(mine, error, np.random.default_rng(5))
    assert equal_bits(mine, array), f"{case}: encode_residual changes the input array"
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
    operands = np.sum([np.abs(exact(one)) for one in (before, flat, decoded, error)], axis=0)
    what = f"{case}: encode_residual loses part of a value: decoded + error"
    require_close(what, case.dtype, exact(decoded) + exact(error), exact(before) + exact(flat), operands, places=2)


def check_stream(case: CodecCase) -> None:
    """Check that `stream` returns ascending indices and their decoded values; all other elements are zero."""
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


def check_exact_parts(case: CodecCase) -> None:
    """Check that the elements in `exact_parts` arrive bit for bit; all elements, if the codec is declared lossless."""
    decoded, flat = case.decode(case.encode()), case.array.reshape(-1)
    why = "the codec is declared lossless" if case.codec.lossless else "the codec sends them exactly"
    for part in [slice(0, flat.size)] if case.codec.lossless else case.codec.exact_parts(flat.size):
        assert equal_bits(decoded[part], flat[part]), (
            f"{case}: elements {part.start} to {part.stop - 1} change, although {why}"
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


def draw(codec: Codec, array: FlatArray, seed: int) -> FlatArray:
    """Return the array, as flat float64, that a receiver decodes from the encoding of `array`.

    `seed` determines the random numbers. A codec whose workers share random numbers is bound to step `seed`.
    """
    one = codec.bind_step(seed) if codec.shares_seed else codec
    data = one.encode(array, np.random.default_rng((seed, 1)))
    return exact(one.decode(data, array.size, array.dtype.name))


def check_error_bound(case: CodecCase) -> None:
    """Check that the mean squared error ||x - decode(encode(x))||² is at most `error_bound(x)` and, if the codec
    declares a `variance`, at most variance · ||x||².

    The bound covers the encoding; the rounding of the result to the array's dtype may add to the error.
    """
    codec, array, dtype, size = case.codec, case.array, case.dtype, case.array.size
    norm = float(np.sum(exact(array) ** 2))
    bounds = {"error_bound": codec.error_bound(array)}
    omega = codec.variance(size)
    if omega is not None:
        bounds["variance"] = omega * norm
    for what, bound in bounds.items():
        # Rounding moves a decoded vector by at most its length times the dtype's relative error.
        rounding = ROUNDING[dtype] * 2 * (np.sqrt(norm) + np.sqrt(bound)) + SMALLEST[dtype] * np.sqrt(size)
        allowed = (np.sqrt(bound) + rounding) ** 2 * (1 + 1e-9)
        mean, error = _squared_error(codec, array, allowed)
        assert mean <= allowed + SIGMAS * error, (
            f"{codec} on {size} elements of {dtype}: {what} promises a squared error of at most {bound:.4g}, got "
            f"{mean:.4g}"
        )


def _squared_error(codec: Codec, array: FlatArray, limit: float) -> tuple[float, float]:
    """Mean and standard error of ||x - decode(encode(x))||², over more draws if a few of them exceed `limit`."""
    x = exact(array)

    def one(seed: int) -> float:
        return float(np.sum((x - draw(codec, array, seed)) ** 2))

    if one(0) == one(1) == one(2) <= limit:  # not random, or of no consequence; a few elements may agree by chance
        return one(0), 0.0
    for begin, count in ((0, FEW), (FEW, 4 * FEW)):
        values = np.array([one(seed) for seed in range(begin, begin + count)])
        mean, error = float(values.mean()), float(values.std() / np.sqrt(count))
        if mean <= limit + SIGMAS * error:
            break
    return mean, error


def check_unbiased(codec: Codec) -> None:
    """Check that the mean over many draws equals the array, element by element and in several random directions."""
    random = np.random.default_rng(1)
    for dtype in ("float32", "float64"):
        array = random.normal(size=64).astype(numpy_dtype(dtype))
        x = exact(array)
        directions = np.vstack([x, np.ones(64), np.sign(x), random.normal(size=(3, 64)), np.eye(64)])
        wanted = directions @ x
        for begin, count in ((0, DRAWS), (DRAWS, 4 * DRAWS)):
            drawn = np.stack([draw(codec, array, seed) for seed in range(begin, begin + count)])
            seen = drawn @ directions.T
            # An element that was never drawn shows no variance, so it may be as far off as a typical element.
            spread = seen.std(axis=0)
            spread[6:] = np.maximum(spread[6:], np.sqrt((spread[6:] ** 2).mean()))
            allowed = SIGMAS * spread / np.sqrt(count) + (1e-10 + 4 * ROUNDING[dtype]) * np.abs(directions) @ np.abs(x)
            off = np.abs(seen.mean(axis=0) - wanted)
            worst = int(np.argmax(off - allowed))
            if off[worst] <= allowed[worst]:
                break
        assert off[worst] <= allowed[worst], (
            f"{codec} is declared unbiased, but the mean of {count} draws of {wanted[worst]:.6g} is "
            f"{seen.mean(axis=0)[worst]:.6g}, which is off by more than {allowed[worst]:.2g}"
        )


def check_linear(case: CodecCase) -> None:
    """Check that encodings with equal random draws can be added: the sum of their `terms` decodes to the sum."""
    codec, array, dtype, size = case.codec, case.array, case.dtype, case.array.size
    second = (exact(array) * np.random.default_rng(2).normal(size=size)).astype(array.dtype)
    arrays = array.reshape(-1), second
    one, other = (codec.encode(part, np.random.default_rng(9)).copy() for part in arrays)
    parts = [exact(codec.decode(part, size, dtype)) for part in (one, other)]
    total = codec.terms(one, size, dtype)
    total += codec.terms(other, size, dtype)
    largest = float(np.abs(list(map(exact, arrays))).max(initial=0))
    operands = np.abs(parts[0]) + np.abs(parts[1]) + largest * (not codec.sparse)
    what = f"{codec} is declared linear, but on {size} elements of {dtype} decoding the sum of two encodings"
    require_close(what, dtype, codec.decode(one, size, dtype), parts[0] + parts[1], operands, places=64)


def check_contraction(codec: Codec) -> None:
    """Check that the mean squared error is below the squared norm at several scales, and that zeros stay zero."""
    assert not draw(codec, np.zeros(33), 0).any(), f"{codec} is declared a contraction, but changes zeros"
    for array in samples("float32"):
        for scale in (1e-3, 1.0, 1e3):
            scaled = exact(array) * scale
            norm = float(np.sum(scaled**2))
            # A random choice of elements may miss a single one in every draw, never half of many.
            several = np.count_nonzero(scaled) > 1
            mean, error = _squared_error(codec, scaled, norm)
            low = mean - SIGMAS * error
            assert low < norm if several else low <= norm, (
                f"{codec} is declared a contraction, but the mean squared error {mean:.3g} of {scaled.size} elements "
                f"is not below their squared norm {norm:.3g}"
            )


def check_tensors(codec: Codec, same_bytes: bool = True) -> None:
    """Check that tensors give the same bytes as arrays, decode to the same numbers, and leave the same error.

    If `same_bytes` is False, as for codecs that multiply matrices, whose order of summation differs between libraries,
    only the numbers of bytes must be equal, and the decoded numbers must agree up to rounding.

    Raises:
        AssertionError: a check fails; the message names the violated rule.
        ImportError: torch is not installed.
    """
    bound = codec.bind_shapes(SHAPES).bind_step(3)
    for dtype in FLOATS:
        for one, arrays in ((codec, [*samples(dtype), wide(dtype)]), (bound, list(tensors(dtype)))):
            for array in arrays:
                for tensor in tensors_of(array):
                    _check_tensor(one, array, tensor, same_bytes)
        plain = np.ones(33).astype(numpy_dtype(dtype))
        plain[17] = np.nan
        said = [_refusal(codec, one) for one in (plain, next(tensors_of(plain)))]
        assert said[0] == said[1], (
            f"{codec} refuses a NaN with different errors: {said[0]!r} for an array, {said[1]!r} for a tensor"
        )


def tensors_of(array: FlatArray) -> Iterator[Any]:
    """Return `array` as a contiguous tensor and, if it is a non-empty vector, as part of a larger one."""
    import torch

    whole = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    whole.copy_(torch.from_numpy(np.array(exact(array).reshape(array.shape))))  # float64 holds every float
    yield whole
    if array.size and array.ndim == 1:
        larger = torch.zeros(2 * array.size, dtype=whole.dtype)
        larger[::2] = whole
        yield larger[::2]


def as_array(tensor: Any, like: FlatArray) -> FlatArray:
    """Return the values of a flat tensor, which has the dtype of the array `like`, as float64."""
    import torch

    return exact(np.frombuffer(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), like.dtype))


def _check_tensor(codec: Any, array: FlatArray, tensor: Any, same_bytes: bool) -> None:
    import torch

    dtype, size, what = array.dtype.name, array.size, f"{codec} on a tensor of {array.size} {array.dtype.name} elements"
    before = tensor.clone()
    wanted = codec.encode(array, np.random.default_rng(11))
    data = codec.encode(tensor, np.random.default_rng(11))
    assert torch.equal(tensor, before), f"{what}: changes the tensor"
    assert isinstance(data, torch.Tensor), f"{what}: encode returns {type(data).__name__} instead of a tensor"
    assert data.dtype == torch.uint8, f"{what}: encode returns {data.dtype} instead of bytes"
    assert tuple(data.shape) == wanted.shape, (
        f"{what}: {len(data)} bytes from the tensor, but {wanted.size} bytes from the equal array"
    )
    decoded = codec.decode(data, size, dtype)
    assert tuple(decoded.shape) == (size,), f"{what}: decoded to {tuple(decoded.shape)}"
    assert decoded.dtype == tensor.dtype, f"{what}: decoded to {decoded.dtype}"
    plain = codec.decode(wanted, size, dtype)
    error, kept = torch.zeros_like(decoded), np.zeros_like(plain)
    later = codec.encode_residual(tensor, error, np.random.default_rng(11))
    later_of_array = codec.encode_residual(array, kept, np.random.default_rng(11))
    if not same_bytes:
        norm = float(np.linalg.norm(exact(array)))
        together = as_array(codec.decode(later, size, dtype), array) + as_array(error, array)
        for part, seen, numbers in (
            ("decoded", as_array(decoded, array), exact(plain)),
            ("the sum of error and decoded tensor", together, exact(array)),
        ):
            off = float(np.linalg.norm(seen - numbers))
            assert off <= NEAR * ROUNDING[dtype] * norm, (
                f"{what}: {part} is off by {off:.3g}, with a norm of {norm:.3g}"
            )
        return
    for method, of_tensor, of_array in (("encode", data, wanted), ("encode_residual", later, later_of_array)):
        assert np.array_equal(of_tensor.numpy(), of_array), (
            f"{what}: the bytes of {method} differ between the tensor and the equal array"
        )
    out, total = torch.ones_like(decoded), np.ones_like(plain)
    codec.add_decoded(data, out, 0.5)
    codec.add_decoded(wanted, total, 0.5)
    operands = np.abs(exact(array)) + np.abs(exact(plain))
    for part, found, equal, magnitudes in (
        ("decode", decoded, plain, np.abs(exact(plain))),
        ("add_decoded", out, total, 1 + operands),
        ("the error kept", error, kept, operands),
    ):
        require_close(f"{what}: {part}", dtype, as_array(found, array), equal, magnitudes)


def _refusal(codec: Codec, array: Any) -> str:
    """The sentence with which a codec refuses an array; empty if it encodes the array."""
    try:
        codec.encode(array, np.random.default_rng(0))
    except Diverged as error:
        return str(error)
    return ""
