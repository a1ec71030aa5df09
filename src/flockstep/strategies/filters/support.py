"""Entries that did not change do not travel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.strategies.filters.base import Filter, Mask


@dataclass(frozen=True)
class Support(Filter):
    """Sparse pushes (Li, Andersen, Park et al. 2014, section 3.1): the keys and values of what is not zero.

    It withholds nothing. Inputs that are zero in a whole batch leave their weights' gradients at zero.
    """

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        """What is not zero."""
        mask: Mask = update != 0
        return mask
