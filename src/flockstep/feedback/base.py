"""The interface of feedback: what a sender keeps of the values that its codec dropped."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.expression import Component


class Feedback(Component):
    """Decides how dropped values are sent later; `memory` is the sender's state, which is None at first."""

    noun: ClassVar[str] = "feedback"

    @property
    def needs_contraction(self) -> bool:
        """Whether the feedback diverges with a codec that is not a contraction."""
        return False

    @abstractmethod
    def encode(self, codec: Codec, array: FlatArray, memory: Any, random: np.random.Generator) -> tuple[Bytes, Any]:
        """Return the bytes to send for `array` (K,), which does not change, and the new memory.

        The new memory may be the given memory, changed in place.
        """

    def bind_workers(self, workers: int) -> Feedback:
        """Return the feedback for `workers` senders whose arrays are averaged; by default the feedback itself."""
        return self
