"""Residual feedback: what the codec dropped is added to the next array."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.feedback.base import Feedback


@dataclass(frozen=True)
class Residual(Feedback):
    """Error feedback: send C(e + x), keep e ← (e + x) - C(e + x) (Seide et al. 2014; Karimireddy et al. 2019).

    The sum of everything sent plus the error kept equals the sum of everything that was to be sent.
    """

    needs_contraction: ClassVar[bool] = True

    def before(self, array: FlatArray, error: FlatArray | None) -> FlatArray:
        """p = e + x."""
        return array if error is None else error + array

    def after(self, wanted: FlatArray, sent: FlatArray) -> FlatArray | None:
        """e = p - decoded."""
        return wanted - sent
