"""Sums of floating-point updates that do not depend on the order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast, namespace
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
    exact = cast(update, "float64") * (1 / GRID)
    return cast(namespace(exact).round(exact) * GRID, name_of(update))


@dataclass(eq=False)
class Ledger:
    """Parameters as an exact sum: any order of the same additions gives the same bits."""

    total: FlatArray
    """In float64."""

    @classmethod
    def of(cls, params: FlatArray) -> Ledger:
        """The sum to begin with."""
        return cls(on_grid(cast(params, "float64")))

    def add(self, update: FlatArray) -> None:
        """Add an update that lies on the grid."""
        self.total += update

    def write(self, params: FlatArray) -> None:
        """Round the sum into `params`.

        Raises:
            Diverged: a parameter has left the range in which sums are exact.
        """
        params[:] = self.total
        if len(params) and not abs(self.total).max() < LIMIT:
            raise Diverged(f"a parameter is not below {LIMIT:g} in magnitude; lower the learning rate or the scale")
