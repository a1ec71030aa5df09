"""No feedback: the values that the codec drops are lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.feedback.base import Feedback


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """No feedback: the sender keeps nothing, which suits lossless and unbiased codecs."""

    def encode(self, codec: Codec, array: FlatArray, memory: Any, random: np.random.Generator) -> tuple[Bytes, Any]:
        return codec.encode(array, random), None
