"""Checks that a codec treats torch tensors like numpy arrays. The checks require torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flockstep.arrays.kernels import FLOATS
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec
from flockstep.errors import Diverged
from flockstep.testing.samples import ROUNDING, SHAPES, SMALLEST, exact, same_bits, samples, tensors, wide

NEAR = 256
"""Largest allowed error of a decoded tensor, in rounding units of its dtype, for codecs whose order of summation is
not fixed.
"""


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
                    (_check_tensor if same_bytes else _check_near)(one, array, tensor)
        _check_refusal(codec, dtype)


def tensors_of(array: FlatArray) -> Iterator[Any]:
    """Return tensors with the values of `array`: a contiguous tensor and, for a non-empty vector, a strided part of a
    larger tensor.
    """
    import torch

    whole = torch.empty(array.shape, dtype=getattr(torch, array.dtype.name))
    whole.copy_(torch.from_numpy(np.array(exact(array).reshape(array.shape))))  # float64 holds every float
    yield whole
    if array.size and array.ndim == 1:
        larger = torch.zeros(2 * array.size, dtype=whole.dtype)
        larger[::2] = whole
        yield larger[::2]


def as_array(tensor: Any, dtype: np.dtype[Any]) -> FlatArray:
    """Return a flat tensor as an array with the same bits."""
    import torch

    return np.frombuffer(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(), dtype)


def _encoded(what: str, codec: Any, array: FlatArray, tensor: Any) -> tuple[FlatArray, Any]:
    """The encoded bytes of the array, and of the tensor as a tensor; both must have the same length."""
    import torch

    before = tensor.clone()
    wanted = codec.encode(array, np.random.default_rng(11))
    data = codec.encode(tensor, np.random.default_rng(11))
    assert torch.equal(tensor, before), f"{what}: changes the tensor"
    assert isinstance(data, torch.Tensor), f"{what}: encode returns {type(data).__name__} instead of a tensor"
    assert data.dtype == torch.uint8, f"{what}: encode returns {data.dtype} instead of bytes"
    assert tuple(data.shape) == wanted.shape, (
        f"{what}: {len(data)} bytes from the tensor, but {wanted.size} bytes from the equal array"
    )
    return wanted, data


def _check_near(codec: Any, array: FlatArray, tensor: Any) -> None:
    import torch

    dtype, what = array.dtype.name, f"{codec} on a tensor of {array.size} {array.dtype.name} elements"
    wanted, data = _encoded(what, codec, array, tensor)
    norm = float(np.linalg.norm(exact(array)))
    error = torch.zeros(array.size, dtype=tensor.dtype)
    later = codec.encode_residual(tensor, error, np.random.default_rng(11))
    decoded = exact(codec.decode(wanted, array.size, dtype))
    seen = {
        "decoded": exact(as_array(codec.decode(data, array.size, dtype), array.dtype)),
        "the sum of error and decoded tensor": exact(as_array(codec.decode(later, array.size, dtype), array.dtype))
        + exact(as_array(error, array.dtype)),
    }
    for part, wanted_numbers in zip(seen, (decoded, exact(array)), strict=True):
        off = float(np.linalg.norm(seen[part] - wanted_numbers))
        assert off <= NEAR * ROUNDING[dtype] * norm, f"{what}: {part} is off by {off:.3g}, with a norm of {norm:.3g}"


def _check_tensor(codec: Any, array: FlatArray, tensor: Any) -> None:
    import torch

    dtype, what = array.dtype.name, f"{codec} on a tensor of {array.size} {array.dtype.name} elements"
    wanted, data = _encoded(what, codec, array, tensor)
    got = data.numpy()
    same = np.array_equal(got, wanted)
    assert same, (
        f"{what}: byte {np.argmax(got != wanted)} of {wanted.size} differs between the tensor and the equal array"
    )
    decoded = codec.decode(data, array.size, dtype)
    assert tuple(decoded.shape) == (array.size,), f"{what}: decoded to {tuple(decoded.shape)}"
    assert decoded.dtype == tensor.dtype, f"{what}: decoded to {decoded.dtype}"
    plain = codec.decode(wanted, array.size, dtype)
    _require_close(f"{what}: decoded", as_array(decoded, array.dtype), plain, np.abs(exact(plain)))
    operands = np.abs(exact(array)) + np.abs(exact(plain))
    out, total = torch.ones_like(decoded), np.ones_like(plain)
    codec.add_decoded(data, out, 0.5)
    codec.add_decoded(wanted, total, 0.5)
    _require_close(f"{what}: add_decoded", as_array(out, array.dtype), total, 1 + operands)
    error, kept = torch.zeros_like(decoded), np.zeros_like(plain)
    bytes_of_tensor = codec.encode_residual(tensor, error, np.random.default_rng(11)).numpy()
    bytes_of_array = codec.encode_residual(array, kept, np.random.default_rng(11))
    assert np.array_equal(bytes_of_tensor, bytes_of_array), (
        f"{what}: the bytes of encode_residual differ between the tensor and the equal array"
    )
    _require_close(f"{what}: the error kept", as_array(error, array.dtype), kept, operands)


def _require_close(what: str, got: FlatArray, wanted: FlatArray, operands: FlatArray) -> None:
    """Check that values agree up to the last place of the operands."""
    if same_bits(got, wanted):
        return
    dtype = wanted.dtype.name
    off = np.abs(exact(got) - exact(wanted))
    worst = int(np.argmax(off))
    close = (off <= 4 * ROUNDING[dtype] * operands + 2 * SMALLEST[dtype]).all()
    assert close, (
        f"{what} differs: {exact(got)[worst]:.9g} from the tensor, {exact(wanted)[worst]:.9g} from the equal array"
    )


def _check_refusal(codec: Codec, dtype: str) -> None:
    """Check that a tensor with a NaN is refused with the same sentence as the equal array."""
    said: list[str] = []
    array = np.ones(33)
    array[17] = np.nan
    plain = array.astype(next(samples(dtype)).dtype)
    for one in (plain, next(tensors_of(plain))):
        try:
            codec.encode(one, np.random.default_rng(0))
            said.append("")
        except Diverged as error:
            said.append(str(error))
    assert said[0] == said[1], (
        f"{codec} refuses a NaN with different errors: {said[0]!r} for an array, {said[1]!r} for a tensor"
    )
