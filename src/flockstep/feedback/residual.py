"""Residual feedback: the sender adds the values that the codec dropped to the next array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.errors import require
from flockstep.feedback.base import Feedback


@dataclass(frozen=True)
class Residual(Feedback):
    """Error feedback (Seide et al. 2014; Karimireddy et al. 2019): send C(e + x), keep e ← (e + x) - C(e + x).

    The sum of all arrays sent plus the error kept equals the sum of all arrays given to `encode`. With a `decay` beta
    below 1 the sender sends C(beta e + x) and keeps the rest: the error takes the place of momentum (SparseLoCo: Sarfi,
    Thérien, Lidin & Belilovsky 2025, algorithm 1).
    """

    decay: float = 1.0

    def __post_init__(self) -> None:
        require(0 < self.decay <= 1, "decay of residual", "in (0, 1]", self.decay, "1 loses nothing")

    needs_contraction = True
    """True, because with a codec that is not a contraction the error could grow without bound."""

    def encode(self, codec: Codec, array: FlatArray, memory: Any, random: np.random.Generator) -> tuple[Bytes, Any]:
        """Encode e + x, and return the bytes with the new memory e (K,)."""
        error = namespace(array).zeros_like(array) if memory is None else memory
        if self.decay != 1:
            error *= self.decay
        return codec.encode_residual(array, error, random), error
