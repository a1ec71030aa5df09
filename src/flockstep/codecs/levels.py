"""The base of int8, QSGD and TernGrad: elements become integer multiples of a fraction of their block's scale."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import copied, first_not_finite
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes
from flockstep.codecs.quantizer import Quantizer


class Levels(Quantizer):
    """Encodes every element of a block as an integer multiple of scale / levels: all scales, then all codes, packed."""

    @abstractmethod
    def grid(self) -> tuple[int, int, bool]:
        """Return the number of levels on either side of zero, the elements per block, and whether rounding is
        stochastic.
        """

    @abstractmethod
    def scales(self, k: Any, floats: FlatArray) -> FlatArray:
        """Return the scale of every block; the scale of a block that is not finite is not finite."""

    @property
    def bits(self) -> int:
        """Number of bits of a code, the fewest that distinguish the integers from -levels to levels."""
        return (2 * self.grid()[0]).bit_length()

    def _scale_bytes(self, size: int, dtype: str) -> int:
        return -(-size // self.grid()[1]) * (8 if dtype == "float64" else 4)

    def coded_bytes(self, size: int, dtype: str) -> int:
        return self._scale_bytes(size, dtype) + (size * self.bits + 7) // 8

    def coded(self, floats: FlatArray, random: np.random.Generator) -> Bytes:
        k = kernels.of(floats)
        levels, block, at_random = self.grid()
        scales = self.scales(k, floats)
        self.refuse(floats, first_not_finite(scales) >= 0)
        seed = kernels.seed_from(random) if at_random else -1
        data: Bytes = k.join(k.as_bytes(scales), k.quantize(floats, scales, block, levels, self.bits, seed))
        return data

    def _read(self, data: Bytes, size: int, dtype: str) -> tuple[Any, Bytes]:
        """Return the step size of every block, and the packed codes.

        Raises:
            ProtocolError: a scale is negative or not finite.
        """
        k, head = kernels.of(data), self._scale_bytes(size, dtype)
        scales = copied(k.from_bytes(data[:head], dtype))
        self.require(first_not_finite(scales) < 0 and not bool((scales < 0).any()), size, dtype)
        return k.steps(scales, self.grid()[0]), data[head:]

    def uncoded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        levels, block, _ = self.grid()
        step, codes = self._read(data, size, dtype)
        array, top = kernels.of(data).dequantize(codes, step, block, levels, self.bits, size)
        self.require(top <= 2 * levels, size, dtype)
        decoded: FlatArray = array
        return decoded

    def add_uncoded(self, data: Bytes, out: FlatArray, scale: float) -> None:
        levels, block, _ = self.grid()
        step, codes = self._read(data, len(out), kernels.name_of(out))
        top = kernels.of(data).add_dequantized(codes, step * float(scale), block, levels, self.bits, out)
        self.require(top <= 2 * levels, len(out), kernels.name_of(out))
