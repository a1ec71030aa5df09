"""Sums of floating-point updates that do not depend on the order of arrival."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast, namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import Diverged

GRID = 2.0**-40
"""Spacing of the grid of values to which updates are rounded: 1e-12, far below the resolution of a float32
parameter.
"""
LIMIT = 2.0**13
"""Magnitude below which a float64 holds every multiple of the grid, so that additions are exact."""


def on_grid(update: FlatArray) -> FlatArray:
    """Return `update` rounded to multiples of the grid, in its own dtype; sender and receivers apply the rounded
    update.

    The result is exact in float32, too: a value of 24 significant bits above 2^-16 is a multiple of the grid already,
    and a smaller multiple of the grid has at most 24 significant bits.
    """
    exact = cast(update, "float64") * (1 / GRID)
    return cast(namespace(exact).round(exact) * GRID, name_of(update))


@dataclass(eq=False)
class ExactSum:
    """Parameters as an exact sum: any order of the same additions gives the same bits."""

    total: FlatArray
    """Sum of the initial parameters and all updates so far, exact, of shape (K,), in float64."""

    @classmethod
    def of(cls, params: FlatArray) -> ExactSum:
        """Return an exact sum that starts at `params` (K,)."""
        return cls(on_grid(cast(params, "float64")))

    def add(self, update: FlatArray) -> None:
        """Add an update (K,), whose elements must be multiples of the grid spacing."""
        self.total += update

    def write(self, params: FlatArray) -> None:
        """Round the sum to the dtype of `params`, and write it to `params`.

        Raises:
            Diverged: a parameter has left the range in which sums are exact.
        """
        params[:] = self.total
        if len(params) and not abs(self.total).max() < LIMIT:
            raise Diverged(
                f"every parameter must be below {LIMIT:g} in magnitude, got a larger one; lower the learning rate "
                "or the scale"
            )
