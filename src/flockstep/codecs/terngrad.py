"""TernGrad: sends -1, 0 or 1 times the tensor's scale, chosen at random, for every element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays import kernels
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec, Shape
from flockstep.codecs.levels import Levels
from flockstep.codecs.parts import Parts
from flockstep.errors import require

WHOLE = 1 << 62
"""Block size that is larger than every tensor, so that each tensor is one block."""


@dataclass(frozen=True)
class TernGrad(Levels):
    """TernGrad (Wen et al. 2017, §3): s sign(x) b with s = max|x| of the tensor, b being 1 with probability |x| / s.

    Magnitudes are first cut off at `clip` times the standard deviation; with inf, nothing is cut off. The deviation is
    about zero, the mean that the paper's argument assumes: about its own mean, a constant tensor would have deviation
    zero and be cut off entirely. Cutting biases the codec. An element takes 2 bits, and every tensor has a scale. Each
    sender has its own scale; the paper shares the largest scale among all workers, which is not needed here, because
    sums of encodings are never sent.
    """

    clip: float = 2.5

    def __post_init__(self) -> None:
        require(self.clip >= 1, "clip of terngrad", ">= 1 standard deviation", self.clip, "2.5 is usual")

    @property
    def unbiased(self) -> bool:
        """Whether `clip` is infinite, so that no magnitude is cut off."""
        return math.isinf(self.clip)

    def grid(self) -> tuple[int, int, bool]:
        return 1, WHOLE, True

    def scales(self, k: Any, floats: FlatArray) -> FlatArray:
        """Return the scale: the largest magnitude of the tensor after magnitudes were cut off at `clip` standard
        deviations.
        """
        top: FlatArray = k.block_scales(floats, WHOLE)
        if math.isinf(self.clip):
            return top
        # A saturated norm would cut off too much.
        limit = k.block_scales(floats, WHOLE, True) * (self.clip / math.sqrt(len(floats)))
        scale: FlatArray = top.clip(max=limit)
        return scale

    def variance(self, size: int) -> float | None:
        """Return the variance omega: (√d - 1) / 2 for d elements if nothing is cut off, which is the maximum of max|x|
        ‖x‖₁ / ‖x‖² - 1; otherwise None.
        """
        return (math.sqrt(size) - 1) / 2 if self.unbiased and size else 0.0 if self.unbiased else None

    def error_bound(self, array: FlatArray) -> float:
        """Return the expected error: the sum over all elements of c (s - c), c being the magnitude after the cut and s
        the scale, plus the squares of the amounts cut off.
        """
        if self.as_it_is(array.size, kernels.name_of(array)):
            return 0.0
        x = np.abs(array.reshape(-1).astype(np.float64))
        s = min(float(x.max()), self.clip * float(np.sqrt(np.mean(np.square(x)))) * (1 + 1e-6))
        kept = np.minimum(x, s)
        return float(np.sum(kept * (s - kept) + np.square(x - kept))) * (1 + 1e-5)

    def bind_shapes(self, shapes: Sequence[Shape]) -> Codec:
        """Return the codec that sends a separate scale for every tensor."""
        return Parts.of([self] * len(shapes), shapes)
