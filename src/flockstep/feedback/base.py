"""The interface of feedback, which keeps the values that a codec has dropped so that they can be sent later."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.expression import Component


class Feedback(Component):
    """Keeps the values that a codec drops, and adds them to later arrays. A sender's `memory` of dropped values is None
    at first.
    """

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
