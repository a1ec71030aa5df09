"""Complete graph: every worker exchanges with every other worker."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Graph, graph_of


@dataclass(frozen=True)
class CompleteGraph(Topology):
    """Every pair of workers exchanges, W = 1 1ᵀ / n: one mixing is an exact average, as in an all-reduce."""

    def graph(self, n: int) -> Graph:
        require_workers(n)
        return graph_of(n, combinations(range(n), 2))

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        require_workers(n)
        return np.full((n, n), 1.0 / n)
