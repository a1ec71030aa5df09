"""A filter that withholds small changes until they add up to a large change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.filters.base import Filter, Mask


@dataclass(frozen=True)
class SignificantlyModified(Filter):
    """Significantly modified filter (Li, Andersen, Park et al. 2014, section 3.6): sends an entry once its accumulated
    change exceeds `threshold` in magnitude.

    The change is the sum of an entry's updates since the entry was last sent. The threshold is in units of gradients,
    because gradients are pushed, not parameters. The entries sent plus the pending entries equal the sum of all
    updates.
    """

    threshold: float = field(default=1e-3, metadata=SHOWN)

    def __post_init__(self) -> None:
        holds = 0 <= self.threshold < math.inf
        require(
            holds, "threshold of significantly_modified", ">= 0 and finite", self.threshold, "use for example 0.001"
        )

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        """Return the mask (K,) of the entries whose magnitude exceeds the threshold or that are not a number."""
        mask: Mask = ~(abs(update) <= self.threshold)
        return mask
