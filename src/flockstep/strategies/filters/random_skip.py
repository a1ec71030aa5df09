"""A random share of the entries waits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flockstep.arrays.namespace import beside
from flockstep.arrays.schema import FlatArray
from flockstep.expression import SHOWN
from flockstep.optimizers.base import require
from flockstep.strategies.filters.base import Filter, Mask


@dataclass(frozen=True)
class RandomSkip(Filter):
    """Random skip filter (Li, Andersen, Smola & Yu 2014): each entry is left out with probability `share`.

    The paper leaves open what becomes of it; here it waits and goes with the next update that is let through.
    """

    share: float = field(default=0.5, metadata=SHOWN)

    def __post_init__(self) -> None:
        require(0 <= self.share < 1, "share of random_skip", "in [0, 1)", self.share, "use 0 to skip nothing")

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        """One draw an entry."""
        return beside(random.random(len(update)) >= self.share, update)
