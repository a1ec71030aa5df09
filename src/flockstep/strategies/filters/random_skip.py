"""A filter that withholds each entry with a fixed probability."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flockstep.arrays.namespace import to_device_of
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.filters.base import Filter, Mask


@dataclass(frozen=True)
class RandomSkip(Filter):
    """Random skip filter (Li, Andersen, Smola & Yu 2014): each entry is left out with probability `share`.

    The paper does not say what happens to a skipped entry; in flockstep, the entry is added to the next update, until
    the entry is sent.
    """

    share: float = field(default=0.5, metadata=SHOWN)

    def __post_init__(self) -> None:
        require(0 <= self.share < 1, "share of random_skip", "in [0, 1)", self.share, "use 0 to skip nothing")

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        return to_device_of(random.random(len(update)) >= self.share, update)
