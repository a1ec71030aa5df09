"""Residual feedback: the sender adds the values that the codec dropped to the next array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.feedback.base import Feedback


@dataclass(frozen=True)
class Residual(Feedback):
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019): send C(e + x), keep e ← (e + x) - C(e + x).

    The sum of all arrays sent plus the error kept equals the sum of all arrays given to `encode`.
    """

    needs_contraction = True
    """True, because with a codec that is not a contraction the error could grow without bound."""

    def encode(self, codec: Codec, array: FlatArray, memory: Any, random: np.random.Generator) -> tuple[Bytes, Any]:
        """Encode e + x, and return the bytes with the new memory e (K,)."""
        error = namespace(array).zeros_like(array) if memory is None else memory
        return codec.encode_residual(array, error, random), error
