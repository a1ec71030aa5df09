"""8-bit blocks: sends every element as a signed byte, which the receiver multiplies by the block's scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.levels import Levels
from flockstep.errors import require

LEVELS = 127


@dataclass(frozen=True)
class Int8(Levels):
    """8-bit blocks (Dettmers et al. 2022, §2): q = round(x / absmax * 127), absmax being a block's largest magnitude.

    Rounding to the nearest changes an element by at most absmax / 254; `stochastic` rounds up or down at random, so
    that the mean is preserved. An element takes 8 + 32 / block bits.
    """

    block: int = 1024
    stochastic: bool = False

    def __post_init__(self) -> None:
        require(self.block >= 1, "block of int8", ">= 1 element", self.block, "256 to 4096 is usual")

    @property
    def unbiased(self) -> bool:
        """Whether rounding is stochastic, so that it preserves the mean."""
        return self.stochastic

    @property
    def contraction(self) -> bool:
        """Whether the codec is a contraction, as it is for blocks of b < 254² elements: a block loses at most b (absmax
        / 254)² of its ||x||² ≥ absmax².
        """
        return self.block < 4 * LEVELS**2

    def grid(self) -> tuple[int, int, bool]:
        return LEVELS, self.block, self.stochastic

    def scales(self, k: Any, floats: FlatArray) -> FlatArray:
        """Return the largest magnitude of every block, which is the block's scale."""
        found: FlatArray = k.block_scales(floats, self.block)
        return found

    def variance(self, size: int) -> float | None:
        """Return the variance omega: b / 254² for blocks of b elements with stochastic rounding, otherwise None.

        An element's variance is at most (absmax / 127)² / 4.
        """
        return min(size, self.block) / (4 * LEVELS**2) if self.stochastic else None

    def error_bound(self, array: FlatArray) -> float:
        """Return an upper bound on the squared error: the sum of (absmax / 254)² over all elements, plus 0.02 % for the
        rounding of x / absmax * 127.
        """
        if self.as_it_is(array.size, kernels.name_of(array)):
            return 0.0
        x = np.abs(array.reshape(-1).astype(np.float64))
        starts = np.arange(0, len(x), self.block)
        counts = np.diff([*starts, len(x)])
        return float(np.sum(counts * np.square(np.maximum.reduceat(x, starts) / LEVELS * (0.5 + 5e-5))))
