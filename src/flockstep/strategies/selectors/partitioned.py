"""A selector that takes the parts of a random partition one after another. The partition is redrawn in every pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import slices
from flockstep.strategies.selectors.base import Selector, parts_for


@dataclass(frozen=True)
class Partitioned(Selector):
    """Selects the parts of a random partition of the parameters into ceil(1/p) parts one after another. The partition
    is redrawn when every part has been averaged once.

    Every parameter is averaged exactly once per pass, each time with a different set of parameters.
    """

    def pick(self, size: int, share: float, seed: int, turn: int) -> npt.NDArray[np.int64]:
        count = parts_for(size, share)
        order = np.random.default_rng((seed, turn // count)).permutation(size)
        return np.sort(order[slices(size, count)[turn % count]])
