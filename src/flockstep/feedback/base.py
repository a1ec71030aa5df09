"""The contract of feedback: what a sender keeps of what its codec dropped."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.expression import Component


class Feedback(Component):
    """How what was not sent comes back: `memory` is explicit state of the sender, None to begin with."""

    noun: ClassVar[str] = "feedback"

    @property
    def needs_contraction(self) -> bool:
        """Diverges with a codec that is not a contraction."""
        return False

    @abstractmethod
    def encode(self, codec: Codec, array: FlatArray, memory: Any, random: np.random.Generator) -> tuple[Bytes, Any]:
        """The bytes to send for `array` (K,), which is left as it is, and the memory from now on.

        The memory may be the one handed in, changed in place.
        """

    def among(self, workers: int) -> Feedback:
        """The feedback for so many senders whose arrays are averaged; itself where that is no matter."""
        return self
