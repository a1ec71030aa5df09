"""Complete graph: every worker exchanges with every other worker."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx
import numpy as np
import numpy.typing as npt

from flockstep.topologies.base import Topology, require_workers


@dataclass(frozen=True)
class CompleteGraph(Topology):
    """Every pair of workers exchanges, W = 1 1ᵀ / n: one mixing is an exact average, as in an all-reduce."""

    def graph(self, n: int) -> nx.Graph:
        require_workers(n)
        return nx.complete_graph(n)

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        require_workers(n)
        return np.full((n, n), 1.0 / n)
