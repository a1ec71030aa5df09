"""The interface of a filter."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component

Mask = npt.NDArray[np.bool_]


class Filter(Component):
    """The interface of a filter, which decides which entries of an update are sent now. With several filters, an entry
    is sent only if all filters let it through.
    """

    noun: ClassVar[str] = "filter"
    carries: ClassVar[bool] = True
    """Whether an entry that the filter withholds is added to the next update. If False, the entry is dropped."""

    @property
    def lists(self) -> int:
        """Number of key lists that sender and receiver remember, so that a repeated list can be sent as its hash."""
        return 0

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        """Return a mask of shape (K,) of the entries to send now, or None to send all entries.

        Args:
            update: the update, of shape (K,), including entries that were withheld from earlier updates.
            params: the sender's parameters, of shape (K,).
            random: the sender's random generator.
        """
        return None
