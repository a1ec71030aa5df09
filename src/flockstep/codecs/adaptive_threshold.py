"""Adaptive threshold: sends the elements above a bound that is estimated so that about the wanted number of elements
exceed it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum, isfinite
from statistics import NormalDist
from typing import Literal

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.codecs.identity import Identity
from flockstep.codecs.streamed import Indices
from flockstep.codecs.threshold import Counted
from flockstep.codecs.top import check_ratio

SAMPLES = 128
"""Number of elements of the sample that should exceed the threshold."""


@dataclass(frozen=True)
class AdaptiveThreshold(Counted):
    """A threshold estimated from a sample, so that about `ratio`·d elements reach it.

    `sample`: the threshold is the magnitude that a fraction `ratio` of the sample reaches (Dryden et al. 2016 sample to
    find the threshold of a fixed proportion, separately for each sign, and send means; here one threshold serves both
    signs and values are sent). `gaussian`: the threshold is mean + c·std of x, with c such that a normal distribution
    has the fraction `ratio` beyond ±c (Shi et al. 2019, Gaussian-k); mean and std are those of the sample, and the
    paper's up to four corrections are left out, because any number of elements may be sent. If no element reaches the
    threshold, the largest element is sent.
    """

    ratio: float = 0.01
    by: Literal["sample", "gaussian"] = "sample"
    values: Codec = Identity()

    def __post_init__(self) -> None:
        check_ratio("adaptive_threshold", self.ratio)

    def choose(self, array: FlatArray, random: np.random.Generator) -> tuple[Bytes, Indices | None]:
        """Select the elements that reach the threshold, or the largest element if none does."""
        k, size = kernels.of(array), len(array)
        stride = max(1, int(size * self.ratio) // SAMPLES)
        offset = kernels.seed_from(random) % stride
        low = self._threshold(array, offset, stride) if size else 0.0
        return self.beyond(array, max(low, k.just_above(array, 0.0)))

    def _threshold(self, array: FlatArray, offset: int, stride: int) -> float:
        k = kernels.of(array)
        if self.by == "sample":
            sample = k.sampled(array, offset, stride)
            return float(sample[len(sample) - max(1, round(self.ratio * len(sample)))])
        numbers = k.as_floats(array[offset::stride])
        most = float(abs(numbers).max())
        if not isfinite(most) or most == 0:
            return most
        shares = (numbers / most).tolist()
        mean, square = fsum(shares) / len(shares), fsum(share * share for share in shares) / len(shares)
        beyond: float = NormalDist().inv_cdf(1 - self.ratio / 2)
        low: float = most * (abs(mean) + beyond * max(0.0, square - mean * mean) ** 0.5)
        return low
