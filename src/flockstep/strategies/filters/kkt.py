"""A filter that drops entries whose parameters an l1 penalty keeps at zero."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.filters.base import Filter, Mask


@dataclass(frozen=True)
class Kkt(Filter):
    """KKT filter (Li, Andersen, Smola & Yu 2014, section 3.3), for the penalty l1 ||w||_1 of the server update
    `proximal`.

    Zero is optimal for a parameter whose gradient is at most l1 in magnitude (the Karush-Kuhn-Tucker condition). So an
    entry whose parameter is zero and whose gradient is at most l1 - slack is dropped: sending it would change nothing.
    `slack` is a margin, because a worker knows only its own gradient.
    """

    carries: ClassVar[bool] = False
    l1: float = field(default=1e-4, metadata=SHOWN)
    slack: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.l1 < math.inf, "l1 of kkt", ">= 0 and finite", self.l1, "use the l1 of proximal")
        require(0 <= self.slack <= self.l1, "slack of kkt", "in [0, l1]", self.slack, "use 0 for none")

    def lets_through(self, update: FlatArray, params: FlatArray, random: np.random.Generator) -> Mask | None:
        """Return the mask (K,) of the entries whose parameters are not zero, or would not stay zero."""
        mask: Mask = (params != 0) | ~(abs(update) <= self.l1 - self.slack)
        return mask
