"""QSGD: every element becomes one of a few multiples of its bucket's norm, chosen at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.levels import Levels
from flockstep.errors import ConfigurationError, require


@dataclass(frozen=True)
class Qsgd(Levels):
    """QSGD (Alistarh et al. 2017, §3): ||x|| sign(x) ξ / s, ξ being s|x| / ||x|| rounded at random with the mean kept.

    The encoding holds one norm per `bucket` of elements, and the integers from -s to s, each in the fewest whole bits;
    s is `levels`. E||C(x) - x||² ≤ min(d / s², √d / s) ||x||² with d elements in a bucket (lemma 3.1).
    """

    levels: int = 4
    bucket: int = 512

    def __post_init__(self) -> None:
        require(
            1 <= self.levels <= 127, "levels of qsgd", "1 to 127", self.levels, "for more levels use half or bfloat16"
        )
        if self.bucket < 8 or self.bucket % 8:
            raise ConfigurationError(f"bucket of qsgd must be a multiple of 8, got {self.bucket}; 512 is usual")

    unbiased = True
    """The codec is unbiased, because stochastic rounding preserves the mean."""

    @property
    def contraction(self) -> bool:
        """Whether the variance omega is below 1, so that the codec is a contraction."""
        return (self.variance(self.bucket) or 0.0) < 1

    def grid(self) -> tuple[int, int, bool]:
        return self.levels, self.bucket, True

    def scales(self, k: Any, floats: FlatArray) -> FlatArray:
        """Return the scale of every bucket: its Euclidean norm."""
        found: FlatArray = k.block_scales(floats, self.bucket, True)
        return found

    def variance(self, size: int) -> float | None:
        """Return the variance omega = min(d / s², √d / s), for buckets of d elements and s levels."""
        d = min(size, self.bucket)
        return min(d / self.levels**2, math.sqrt(d) / self.levels)

    def error_bound(self, array: FlatArray) -> float:
        """Return an upper bound on the error: the variance omega times ||x||²."""
        if self.as_it_is(array.size, kernels.name_of(array)):
            return 0.0
        return (self.variance(array.size) or 0.0) * float(np.sum(np.square(array.astype(np.float64))))
