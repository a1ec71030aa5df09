"""A selector that selects each parameter independently, with the same probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.strategies.selectors.base import Selector


@dataclass(frozen=True)
class RandomSelector(Selector):
    """Selects each parameter with probability p, independently of earlier selections.

    After T turns a parameter has been averaged with probability 1 - (1 - p)^T.
    """

    def pick(self, size: int, share: float, seed: int, turn: int) -> npt.NDArray[np.int64]:
        return np.flatnonzero(np.random.default_rng((seed, turn)).random(size) < share)
