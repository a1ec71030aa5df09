"""Binned: sends the bin of every element, of a few bins around the mean, and the mean of each bin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.kernels.numpy_selection import halved_sum
from flockstep.arrays.namespace import cast, first_not_finite, namespace, to_device_of
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.low_rank import factor_dtype
from flockstep.codecs.parts import Parts
from flockstep.codecs.quantizer import Quantizer
from flockstep.errors import require


@dataclass(frozen=True)
class Binned(Quantizer):
    """Statistical bins, as SparseLoCo uses them for its values (Sarfi, Thérien, Lidin & Belilovsky 2025, and the
    authors' code): `bits` bits per element, decoded as the mean of the elements in the same bin.

    With the mean m and the standard deviation s of a tensor's d elements (divisor d - 1), element x has the code
    round((x - m) 2^bits / (`sigmas` s) + 2^(bits - 1)), cut to the integers from 0 to 2^bits - 1. A tensor's encoding
    holds the means of the bins as float32 (float64 for float64 arrays) and the codes. The sum of the tensor is
    preserved, but the codec is biased; use residual feedback.
    """

    bits: int = 2
    sigmas: float = 6.0

    def __post_init__(self) -> None:
        require(2 <= self.bits <= 4, "bits of binned", "2 to 4", self.bits, "for more bits use int8")
        require(0 < self.sigmas <= 6, "sigmas of binned", "> 0 and <= 6 standard deviations", self.sigmas, "6 is usual")

    contraction = True
    """The codec is a contraction with delta ≥ 0.56 / (d - 1): a part of the squared norm that the means of the bins
    keep, since of at least three elements one lies outside the middle bin.
    """

    def coded_bytes(self, size: int, dtype: str) -> int:
        return (factor_dtype(dtype).itemsize << self.bits) + (size * self.bits + 7) // 8

    def coded(self, floats: FlatArray, random: np.random.Generator) -> Bytes:
        k, xp, bins, size = kernels.of(floats), namespace(floats), 1 << self.bits, len(floats)
        x: Any = cast(floats, "float64")
        centered = x - halved_sum(x) / size
        deviation = math.sqrt(halved_sum(centered * centered) / (size - 1))
        self.refuse(floats, not math.isfinite(deviation))
        scale = self.sigmas * deviation / bins or 1.0
        codes = cast(xp.round(centered / scale + bins / 2).clip(0, bins - 1), "uint8")
        means = np.zeros(bins, factor_dtype(kernels.name_of(floats)))
        for code in range(bins):
            inside = x[codes == code]
            if len(inside):
                means[code] = halved_sum(inside) / len(inside)
        data: Bytes = k.join(k.as_bytes(to_device_of(means, floats)), k.pack(codes, self.bits))
        return data

    def uncoded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        k, head = kernels.of(data), factor_dtype(dtype).itemsize << self.bits
        means = k.from_bytes(data[:head], dtype)
        self.require(first_not_finite(means) < 0, size, dtype)
        decoded: FlatArray = namespace(data).take(means, cast(k.unpack(data[head:], size, self.bits), "int64"))
        return decoded

    def error_bound(self, array: FlatArray) -> float:
        """Return the sum of the squared deviations from the mean as an upper bound on the squared error: the means of
        bins are nearer to the elements than the mean of all.
        """
        x = array.reshape(-1).astype(np.float64)
        return float(np.sum(np.square(x - x.mean()))) if len(x) else 0.0

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return the codec in which every tensor has its own bins."""
        return Parts.of([self] * len(shapes), shapes)
