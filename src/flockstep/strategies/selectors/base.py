"""The contract of a selector."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.expression import Component


class Selector(Component):
    """Which of the parameters are averaged after a step: the same on every worker, without a word about it.

    A selection follows from a common seed and the number of the step alone, so that nothing has to be remembered.
    """

    noun: ClassVar[str] = "selector"

    @abstractmethod
    def pick(self, size: int, share: float, seed: int, turn: int) -> npt.NDArray[np.int64]:
        """About a `share` of range(size), ascending, at the turn numbered `turn`, from 0."""


def parts_for(size: int, share: float) -> int:
    """Into how many parts `size` elements are cut so that each holds at most about a `share` of them: ceil(1/share)."""
    return max(1, min(size, math.ceil(1 / share)))
