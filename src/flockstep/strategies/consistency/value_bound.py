"""Value-bounded consistency: a bound on how far parameter values may have moved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import require
from flockstep.expression import SHOWN
from flockstep.strategies.consistency.base import Consistency, ConsistencyView, Push, Read


@dataclass(frozen=True)
class ValueBound(Consistency):
    """Value-bounded asynchronous parallel, VAP (Wei et al. 2013; Langer et al. 2020, section 3.3.4): asynchronous as
    long as no value moves by `delta` or more.

    Gradients are applied on arrival. A read is admitted while no parameter has moved by `delta` or more since the
    oldest version with which a worker still computes. If no worker computes, all waiting reads are admitted: a single
    update may exceed the bound, and no later event could then reduce the drift. With `decreasing`, the bound is delta /
    sqrt(t) in the t-th version (Dai et al. 2015, theorem 3).
    """

    delta: float = field(default=0.1, metadata=SHOWN)
    decreasing: bool = False

    def __post_init__(self) -> None:
        require(self.delta > 0, "delta", "> 0", self.delta, "use bsp to allow no difference at all")

    delivery = "bounded delay"
    survives = True
    alone = True
    compares_versions = True

    def full_step(self, workers: int) -> int:
        return 1

    def admitted(self, reads: Sequence[Read], view: ConsistencyView) -> list[Read]:
        """Return all read requests if the drift of the parameters is below the bound or no worker computes; otherwise,
        return no read requests.
        """
        bound = self.delta / math.sqrt(max(1, view.version)) if self.decreasing else self.delta
        return list(reads) if not view.reading or self._drift(view) < bound else []

    def _drift(self, view: ConsistencyView) -> float:
        """Return the largest absolute change since the oldest version that a worker computes on; delete older
        copies.
        """
        oldest = min(view.reading.values())
        for version in [version for version in view.kept if version < oldest]:
            del view.kept[version]
        return float(abs(view.params - view.kept[oldest]).max()) if len(view.params) else 0.0

    def released(self, pending: Sequence[Push], view: ConsistencyView) -> list[list[Push]]:
        return [[push] for push in pending]
