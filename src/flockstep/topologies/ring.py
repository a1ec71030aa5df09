"""Ring: every worker exchanges with the worker before it and the worker after it."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Graph, graph_of


@dataclass(frozen=True)
class RingGraph(Topology):
    """A ring of n workers, with weight 1/3 for the worker and for each neighbor (D-PSGD: Lian et al. 2017).

    Two workers share one edge, with weights 1/2.
    """

    def graph(self, n: int) -> Graph:
        """Return the cycle with the edges (i, i + 1 mod n); a path for at most two workers."""
        require_workers(n)
        return graph_of(n, ((i, (i + 1) % n) for i in range(n if n > 2 else n - 1)))
