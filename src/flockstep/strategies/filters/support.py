"""The support filter: zero entries are not sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.strategies.filters.base import Filter, Mask


@dataclass(frozen=True)
class Support(Filter):
    """Sparse pushes (Li, Andersen, Park et al. 2014, section 3.1): the keys and values of the non-zero entries.

    The filter withholds nothing. Inputs that are zero in a whole batch leave their weights' gradients at zero.
    """

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        mask: Mask = update != 0
        return mask
