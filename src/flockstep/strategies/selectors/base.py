"""The interface of a selector."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.expression import Component


class Selector(Component):
    """The interface of a selector, which decides which parameters are averaged after a step. All workers decide the
    same, without communication.

    A selection depends only on the common seed and the number of the step, so that a selector has no state.
    """

    noun: ClassVar[str] = "selector"

    @abstractmethod
    def pick(self, size: int, share: float, seed: int, turn: int) -> npt.NDArray[np.int64]:
        """Return about the fraction `share` of the indices of range(size), in ascending order.

        Args:
            size: number of parameters K.
            share: fraction of the parameters to pick, in (0, 1].
            seed: the seed that all workers share.
            turn: number of the step, from 0.
        """


def parts_for(size: int, share: float) -> int:
    """Return ceil(1/share), the number of parts into which the `size` elements of a model are divided; at most
    `size`.
    """
    return max(1, min(size, math.ceil(1 / share)))
