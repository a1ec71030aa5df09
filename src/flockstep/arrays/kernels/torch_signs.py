"""Sign quantization with the means of negative and of nonnegative elements, and rounding to powers of two, for
torch.
"""

from __future__ import annotations

from typing import Any

import torch

from flockstep.arrays.kernels import numpy_signs
from flockstep.arrays.kernels.torch_bits import mixed, pack, unpack


def signs(x: torch.Tensor, added: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one bit per element, 1 if the element is below zero, and an array of three sums.

    The sums are: the sum of the elements ≥ 0, the sum of the elements < 0, and the number of elements < 0.

    If `added` is given, it is first added to `x` in place.
    """
    if x.device.type == "cpu":  # the same order of the sums as for numpy arrays, hence the same bits
        return _made(numpy_signs.signs(x.detach().numpy(), None if added is None else added.detach().numpy()))
    bits, sums = device_signs(x[:, None], None if added is None else added[:, None])
    return bits, sums[:, 0]


def column_signs(matrix: torch.Tensor, added: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each column of a row-major matrix, the sign bits and the three sums that `signs` returns: bits in row
    order, sums of shape (3, columns).
    """
    if matrix.device.type == "cpu":
        plain = None if added is None else added.detach().numpy()
        return _made(numpy_signs.column_signs(matrix.detach().numpy(), plain))
    return device_signs(matrix, added)


def device_signs(matrix: torch.Tensor, added: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the bits and sums of `column_signs` on any device; sums may differ in their last digit."""
    if added is not None:
        matrix += added
    wide = matrix.to(torch.float64)
    above, below = wide >= 0, wide < 0
    # NaN is on neither side, but must appear in the sums.
    sums = [torch.where(below, 0, wide).sum(0), torch.where(above, 0, wide).sum(0), below.sum(0).to(torch.float64)]
    return pack(below.to(torch.uint8).reshape(-1), 1), torch.stack(sums)


def _made(arrays: tuple[Any, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])


def from_signs(data: torch.Tensor, high: float, low: float, size: int, dtype: str) -> torch.Tensor:
    """Decode signs: return `low` for every bit 1 and `high` for every bit 0, as float32 or float64."""
    pair = torch.tensor([high, low], dtype=getattr(torch, dtype), device=data.device)
    return pair[unpack(data, size, 1).to(torch.int64)]


def add_signs(data: torch.Tensor, high: float, low: float, out: torch.Tensor) -> None:
    """Decode signs and add them to `out`, which is flat: `low` for every bit 1, `high` for every bit 0."""
    out += from_signs(data, high, low, len(out), str(out.dtype).removeprefix("torch."))


def less_sides(x: torch.Tensor, high: float, low: float) -> None:
    """Subtract, in place, `low` from the elements below zero and `high` from all other elements."""
    pair = torch.tensor([high, low], dtype=x.dtype, device=x.device)
    x -= pair[(x < 0).to(torch.int64)]


def to_powers(x: torch.Tensor, top: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Round every element at random to one of the two nearest powers of two, so that the mean is preserved.

    Returns:
        The low 8 bits of the exponent fields, none beyond `top`; the remaining bits, packed, 1 bit per element (4 for
        float64): 2 · the higher exponent bits, plus 1 if the element is negative; and whether all elements are finite.
    """
    double = x.dtype == torch.float64
    digits = 52 if double else 23
    bits = x.contiguous().view(torch.int64 if double else torch.int32).to(torch.int64)
    magnitude = bits & ((1 << (63 if double else 31)) - 1)
    carry = (mixed(torch.arange(len(x), device=x.device), seed) >> 9) << (digits - 23)
    power = ((magnitude + carry) >> digits).clamp(max=top)
    high = pack(((power >> 8) << 1) | (bits < 0), 4 if double else 1)
    return (power & 0xFF).to(torch.uint8), high, bool(torch.isfinite(x).all())


def from_powers(low: torch.Tensor, high: torch.Tensor, dtype: str) -> tuple[torch.Tensor, int]:
    """Decode powers of two that `to_powers` encoded, as float32 or float64; also return the largest exponent field."""
    digits, wide, bits = (52, torch.int64, 4) if dtype == "float64" else (23, torch.int32, 1)
    rest = unpack(high, len(low), bits)
    power = low.to(wide) | ((rest >> 1).to(wide) << 8)
    value = (power << digits).view(getattr(torch, dtype))
    return torch.where((rest & 1).bool(), -value, value), int(power.max()) if len(low) else 0


def add_powers(low: torch.Tensor, high: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> int:
    """Decode powers of two, and add `scale` times each to the flat tensor `out`; return the largest exponent field."""
    decoded, top = from_powers(low, high, str(out.dtype).removeprefix("torch."))
    out += decoded * scale
    return top


def side_means(sums: torch.Tensor, rows: int, dtype: str) -> torch.Tensor:
    """Return, for each column of a matrix, the mean of its elements ≥ 0 and the mean of its elements < 0, as a (2,
    columns) tensor of `dtype`; `rows` is the number of rows.
    """
    counts = torch.stack([rows - sums[2], sums[2]])
    return (sums[:2] / counts.clamp(min=1)).to(getattr(torch, dtype))


def from_column_signs(data: torch.Tensor, means: torch.Tensor, size: int) -> torch.Tensor:
    """Decode the sign bits of a row-major matrix: an element becomes the first mean of its column, or the second mean
    if its bit is 1.
    """
    bits = unpack(data, size, 1).reshape(-1, means.shape[1])
    return torch.where(bits != 0, means[1], means[0]).reshape(-1)


def add_column_signs(data: torch.Tensor, means: torch.Tensor, out: torch.Tensor) -> None:
    """Decode the sign bits of a row-major matrix as `from_column_signs` does, and add the values to `out`, which is
    flat.
    """
    out += from_column_signs(data, means, len(out))
