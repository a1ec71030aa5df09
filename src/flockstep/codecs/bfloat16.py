"""bfloat16: sends every element as a float with 8 bits of exponent and 7 of fraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.quantizer import LARGEST
from flockstep.codecs.rounded import Rounded


@dataclass(frozen=True)
class Bfloat16(Rounded):
    """Rounding to the nearest bfloat16, ties to even: 2 bytes per element, 8 significant bits, the range of float32.

    Finite values beyond ±3.39e38 become ±3.39e38; infinities and NaN do not change. float64 is rounded to float32
    first. Arrays of float16 and bfloat16, which have 2 bytes per element already, are sent unchanged.
    """

    form: ClassVar[str] = "bfloat16"
    whole: ClassVar[tuple[str, ...]] = ("float16", "bfloat16")

    def error_bound(self, array: FlatArray) -> float:
        """Return the sum over all elements of the squared rounding error: half a unit in the last place (2⁻⁸ of the
        element, at least 2⁻¹³⁴), or the excess over the range.
        """
        if array.dtype.name in LARGEST:
            return 0.0
        x = np.abs(array.astype(np.float64))
        off = np.maximum(np.maximum(x * (2.0**-8 + 2.0**-23), 2.0**-133), x - LARGEST["bfloat16"])
        with np.errstate(over="ignore"):
            return float(np.sum(np.square(off)))
