"""Small changes wait until they add up."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.expression import SHOWN
from flockstep.optimizers.base import require
from flockstep.strategies.filters.base import Filter, Mask


@dataclass(frozen=True)
class SignificantlyModified(Filter):
    """Significantly modified filter (Li, Andersen, Park et al. 2014, section 3.6): |change| > threshold.

    The change is all that has come up since the entry was last sent, in the unit of what is pushed: of gradients, not
    of parameters. What was sent and what is pending add up to all updates.
    """

    threshold: float = field(default=1e-3, metadata=SHOWN)

    def __post_init__(self) -> None:
        holds = 0 <= self.threshold < math.inf
        require(
            holds, "threshold of significantly_modified", ">= 0 and finite", self.threshold, "use for example 0.001"
        )

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        """What is larger than the threshold, and what is not a number."""
        mask: Mask = ~(abs(update) <= self.threshold)
        return mask
