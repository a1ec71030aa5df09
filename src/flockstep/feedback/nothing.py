"""No feedback: what the codec drops is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.feedback.base import Feedback


@dataclass(frozen=True)
class NoFeedback(Feedback):
    """The sender keeps nothing; right for lossless and unbiased codecs."""

    needs_contraction: ClassVar[bool] = False

    def before(self, array: FlatArray, error: FlatArray | None) -> FlatArray:
        """The array as it is."""
        return array

    def after(self, wanted: FlatArray, sent: FlatArray) -> FlatArray | None:
        """No state."""
        return None
