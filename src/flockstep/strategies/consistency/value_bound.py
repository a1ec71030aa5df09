"""A bound on how far values may have moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.expression import SHOWN, searched
from flockstep.strategies.consistency.base import Consistency, Push, Read, View


@dataclass(frozen=True)
class ValueBound(Consistency):
    """Value-bounded asynchronous parallel, VAP (Wei et al. 2013; Langer et al. 2020, section 3.3.4).

    Gradients are applied on arrival. A worker is admitted while no parameter has moved by `delta` or more since the
    oldest version that somebody still computes on. If nobody computes, whoever waits is admitted: a single update may
    exceed the bound, and then nothing else could ever bring it down. With `decreasing`, the bound is delta / sqrt(t) in
    the t-th version (Dai et al. 2015, theorem 3).
    """

    delta: float = field(default=0.1, metadata=SHOWN | searched(0.01, 1.0, whole=False))
    decreasing: bool = False

    def __post_init__(self) -> None:
        if not self.delta > 0:
            raise ConfigurationError(f"delta must be > 0, got {self.delta}; use bsp for no change at all")

    completeness = 2
    survives = True

    def full_step(self, workers: int) -> int:
        """Each gradient is a full step."""
        return 1

    def admitted(self, reads: Sequence[Read], view: View) -> list[Read]:
        """All, or none."""
        bound = self.delta / math.sqrt(max(1, view.version)) if self.decreasing else self.delta
        return list(reads) if not view.reading or self._drift(view) < bound else []

    def _drift(self, view: View) -> float:
        """The largest absolute change since the oldest version that somebody computes on; older ones are dropped."""
        oldest = min(view.reading.values())
        for version in [version for version in view.kept if version < oldest]:
            del view.kept[version]
        return float(abs(view.params - view.kept[oldest]).max()) if len(view.params) else 0.0

    def keep(self, kept: dict[int, FlatArray], version: int, params: FlatArray) -> None:
        """Every version, until nobody computes on it any more."""
        kept[version] = copied(params)

    def released(self, pending: Sequence[Push], view: View) -> list[list[Push]]:
        """Each at once."""
        return [[push] for push in pending]
