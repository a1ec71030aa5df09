"""The contract of a filter."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component

Mask = npt.NDArray[np.bool_]


class Filter(Component):
    """Decides which entries of an update travel now; several filters together send what all of them let through."""

    noun: ClassVar[str] = "filter"
    carries: ClassVar[bool] = True
    """An entry that it withholds is added to the next update; otherwise it is gone."""

    @property
    def lists(self) -> int:
        """How many lists of keys both ends remember, so that one that is sent again travels as its hash."""
        return 0

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        """Which entries of `update`, (K,), to send, where `params` are the sender's parameters; None: all."""
        return None
