"""Half: sends every element as a 16-bit float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.quantizer import LARGEST
from flockstep.codecs.rounded import Rounded


@dataclass(frozen=True)
class Half(Rounded):
    """Rounding to the nearest IEEE float16: 2 bytes per element, 11 significant bits.

    Finite values beyond ±65504 become ±65504; infinities and NaN do not change. Magnitudes below 2⁻²⁵ become zero.
    Rounding is deterministic, hence biased. The codec contracts any array of d elements whose largest magnitude lies in
    [2⁻²⁴, 65504], with delta ≥ 8/(9d); residual feedback keeps what lies outside that range and sends it later. Arrays
    of float16 are sent unchanged.
    """

    form: ClassVar[str] = "float16"
    whole: ClassVar[tuple[str, ...]] = ("float16",)

    def error_bound(self, array: FlatArray) -> float:
        """Return the sum over all elements of the squared rounding error: half a unit in the last place (2⁻¹¹ of the
        element, at least 2⁻²⁵), or the excess over ±65504.
        """
        x = np.abs(array.astype(np.float64))
        off = np.maximum(np.maximum(x * 2.0**-11, 2.0**-25), x - LARGEST["float16"])
        return float(np.sum(np.square(off)))
