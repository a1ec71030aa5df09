"""Blocks of elements as whole multiples of a fraction of their scale: what int8, QSGD and TernGrad have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.namespace import first_not_finite
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes
from flockstep.codecs.quantiser import Quantiser


class Levels(Quantiser):
    """Blocks of elements, each as whole multiples of its scale / levels: the scales, then all codes, packed."""

    @abstractmethod
    def grid(self) -> tuple[int, int, bool]:
        """Multiples on either side of zero, elements of a block, and whether these are rounded at random."""

    @abstractmethod
    def scales(self, k: Any, floats: FlatArray) -> FlatArray:
        """The scale of every block; one that is not finite where a block is not."""

    @property
    def bits(self) -> int:
        """The fewest bits that tell -levels to levels from each other."""
        return (2 * self.grid()[0]).bit_length()

    def _scale_bytes(self, size: int, dtype: str) -> int:
        return -(-size // self.grid()[1]) * (8 if dtype == "float64" else 4)

    def coded_bytes(self, size: int, dtype: str) -> int:
        """A scale a block, and the bits of the codes."""
        return self._scale_bytes(size, dtype) + (size * self.bits + 7) // 8

    def coded(self, floats: FlatArray, random: np.random.Generator) -> Bytes:
        """Scales, then codes."""
        k = kernels.of(floats)
        levels, block, at_random = self.grid()
        scales = self.scales(k, floats)
        self.refuse(floats, first_not_finite(scales) >= 0)
        seed = kernels.seed_from(random) if at_random else -1
        data: Bytes = k.join(k.as_bytes(scales), k.quantise(floats, scales, block, levels, self.bits, seed))
        return data

    def _read(self, data: Bytes, size: int, dtype: str) -> tuple[Any, Bytes]:
        """The step of every block, and the codes."""
        k, head = kernels.of(data), self._scale_bytes(size, dtype)
        scales = k.copied(k.from_bytes(data[:head], dtype))
        self.require(first_not_finite(scales) < 0 and not bool((scales < 0).any()), size, dtype)
        return k.steps(scales, self.grid()[0]), data[head:]

    def uncoded(self, data: Bytes, size: int, dtype: str) -> FlatArray:
        """Code times step."""
        levels, block, _ = self.grid()
        step, codes = self._read(data, size, dtype)
        array, top = kernels.of(data).dequantise(codes, step, block, levels, self.bits, size)
        self.require(top <= 2 * levels, size, dtype)
        decoded: FlatArray = array
        return decoded

    def add_uncoded(self, data: Bytes, out: FlatArray, scale: float) -> None:
        """The same, with steps that are scaled already."""
        levels, block, _ = self.grid()
        step, codes = self._read(data, len(out), kernels.name_of(out))
        top = kernels.of(data).add_dequantised(codes, step * float(scale), block, levels, self.bits, out)
        self.require(top <= 2 * levels, len(out), kernels.name_of(out))
