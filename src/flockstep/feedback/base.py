"""The contract of feedback: what a sender keeps of what its codec dropped."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component


class Feedback(Component):
    """What is added to the next array before it is encoded; `error` is explicit state, None to begin with."""

    noun: ClassVar[str] = "feedback"
    needs_contraction: ClassVar[bool]
    """Diverges with a codec that is not a contraction."""

    @abstractmethod
    def before(self, array: FlatArray, error: FlatArray | None) -> FlatArray:
        """What to encode in place of `array`."""

    @abstractmethod
    def after(self, wanted: FlatArray, sent: FlatArray) -> FlatArray | None:
        """The new error, after `wanted` was encoded and `sent` is what the receiver decodes."""
