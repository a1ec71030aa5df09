"""A selector that takes the parts of a random order one after another. The order is drawn once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import slices
from flockstep.strategies.selectors.base import Selector, parts_for


@dataclass(frozen=True)
class Shuffled(Selector):
    """Shuffled-sequential selection: the parameters are put in a random order and cut into ceil(1/p) parts, which are
    the same in every pass.

    Every parameter is averaged exactly once in ceil(1/p) turns.
    """

    def pick(self, size: int, share: float, seed: int, turn: int) -> npt.NDArray[np.int64]:
        count = parts_for(size, share)
        order = np.random.default_rng(seed).permutation(size)
        return np.sort(order[slices(size, count)[turn % count]])
