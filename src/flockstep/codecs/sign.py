"""signSGD: sends the sign of every element, and one scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import cast, first_not_finite
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec, Shape
from flockstep.codecs.parts import Parts
from flockstep.codecs.quantizer import Quantizer


@dataclass(frozen=True)
class Sign(Quantizer):
    """signSGD with a scale (Karimireddy et al. 2019, algorithm 2): (||x||₁ / d) sign(x) for every tensor of d elements.

    ||C(x) - x||² = (1 - ||x||₁² / (d ||x||²)) ||x||². With `scaled` false only ±1 is sent, as in signSGD (Bernstein et
    al. 2018). The sign of zero is +1. A tensor takes d + 32 bits if scaled, otherwise d bits.
    """

    scaled: bool = True

    @property
    def contraction(self) -> bool:
        """Whether the codec is scaled; then it is a contraction, because ||x||₁² ≥ ||x||²."""
        return self.scaled

    def _head(self, size: int, dtype: str) -> int:
        return (8 if dtype == "float64" else 4) if size and self.scaled else 0

    def coded_bytes(self, size: int, dtype: str) -> int:
        return self._head(size, dtype) + (size + 7) // 8

    def as_it_is(self, size: int, dtype: str) -> bool:
        """Return whether an array is sent unchanged; never if the codec has no scale, because the array would not
        consist of signs.
        """
        return self.scaled and super().as_it_is(size, dtype)

    def coded(self, floats: FlatArray, random: np.random.Generator) -> Bytes:
        k = kernels.of(floats)
        bits, sums = k.signs(floats)
        # The difference of the two sums is that of the magnitudes.
        total = sums.clip(min=0)[:1] - sums[1:2] if len(floats) else sums[:1]
        scale = cast(total / max(len(floats), 1), kernels.name_of(floats), copy=False)
        self.refuse(floats, first_not_finite(scale) >= 0)
        data: Bytes = k.join(k.as_bytes(scale), bits) if self.scaled else bits
        return data

    def _scale(self, data: Bytes, size: int, dtype: str) -> float:
        if not self.scaled or not size:
            return 1.0
        k, head = kernels.of(data), self._head(size, dtype)
        scale = float(k.from_bytes(data[:head], dtype)[0])
        self.require(math.isfinite(scale) and scale >= 0, size, dtype)
        return scale

    def uncoded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        scale, bits = self._scale(data, size, dtype), data[self._head(size, dtype) :]
        array: FlatArray = kernels.of(data).from_signs(bits, scale, -scale, size, dtype)
        return array

    def add_uncoded(self, data: Bytes, out: FlatArray, scale: float) -> None:
        dtype = kernels.name_of(out)
        high = scale * self._scale(data, len(out), dtype)
        kernels.of(data).add_signs(data[self._head(len(out), dtype) :], high, -high, out)

    def error_bound(self, array: FlatArray) -> float:
        """Return the exact error for a tensor x of d elements: ‖x‖² - ‖x‖₁² / d; without a scale, the sum of (|x| -
        1)².
        """
        x = np.abs(array.reshape(-1).astype(np.float64))
        if not self.scaled:
            return float(np.sum(np.square(x - 1)))
        if self.as_it_is(array.size, kernels.name_of(array)):
            return 0.0
        return float(np.sum(np.square(x - x.mean())))

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return the codec that sends a separate scale for every tensor."""
        return Parts.of([self] * len(shapes), shapes)
