"""Sums of floating-point updates that do not depend on the order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.errors import Diverged

GRID = 2.0**-40
"""Updates are rounded to multiples of this; 1e-12, far below what a float32 parameter resolves."""
LIMIT = 2.0**13
"""Below this magnitude a float64 holds every multiple of the grid, so that adding them is exact."""


def on_grid(update: FlatArray) -> FlatArray:
    """`update` rounded to multiples of the grid, in its own dtype: what is sent and what the sender itself applies.

    Exact in float32 too: a value of 24 significant bits that is larger than 2^-16 is a multiple of the grid already,
    and a smaller multiple of the grid has at most 24 significant bits.
    """
    rounded: FlatArray = (np.rint(update * np.float64(1 / GRID)) * GRID).astype(update.dtype)
    return rounded


@dataclass(eq=False)
class Ledger:
    """Parameters as an exact sum: any order of the same additions gives the same bits."""

    total: npt.NDArray[np.float64]

    @classmethod
    def of(cls, params: FlatArray) -> Ledger:
        """The sum to begin with."""
        return cls(on_grid(params.astype(np.float64)))

    def add(self, update: FlatArray) -> None:
        """Add an update that lies on the grid."""
        self.total += update

    def write(self, params: FlatArray) -> None:
        """Round the sum into `params`.

        Raises:
            Diverged: a parameter has left the range in which sums are exact.
        """
        params[:] = self.total
        if not np.abs(self.total).max(initial=0.0) < LIMIT:
            raise Diverged(f"a parameter is not below {LIMIT:g} in magnitude; lower the learning rate or the scale")
