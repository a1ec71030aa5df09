"""The support filter, which sends no zero entries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.strategies.filters.base import Filter, Mask


@dataclass(frozen=True)
class Support(Filter):
    """Sparse pushes (Li, Andersen, Park et al. 2014, section 3.1): sends the keys and values of the non-zero entries.

    No information is withheld. If an input is zero in a whole batch, the gradients of its weights are zero.
    """

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        mask: Mask = update != 0
        return mask
