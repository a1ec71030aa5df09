"""The interface of a filter."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component

Mask = npt.NDArray[np.bool_]


class Filter(Component):
    """Decides which entries of an update are sent now; of several filters, all must let an entry through."""

    noun: ClassVar[str] = "filter"
    carries: ClassVar[bool] = True
    """Whether an entry that the filter withholds is added to the next update; otherwise the entry is dropped."""

    @property
    def lists(self) -> int:
        """Number of key lists that both ends remember, so that a repeated list can be sent as its hash."""
        return 0

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        """Return a mask of shape (K,) of the entries to send, or None for all.

        Args:
            update: the update, of shape (K,), including entries that were withheld from earlier updates.
            params: the sender's parameters, of shape (K,).
            random: the sender's random generator.
        """
        return None
