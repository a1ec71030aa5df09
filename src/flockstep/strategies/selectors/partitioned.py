"""One part after the other of an order drawn anew in every pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import slices
from flockstep.strategies.selectors.base import Selector, parts_for


@dataclass(frozen=True)
class Partitioned(Selector):
    """A random partition into ceil(1/p) parts, redrawn when each of them has had its turn.

    Every parameter is averaged exactly once in each pass, in other company every time.
    """

    def pick(self, size: int, share: float, seed: int, turn: int) -> npt.NDArray[np.int64]:
        """The next part of this pass's order."""
        count = parts_for(size, share)
        order = np.random.default_rng((seed, turn // count)).permutation(size)
        return np.sort(order[slices(size, count)[turn % count]])
