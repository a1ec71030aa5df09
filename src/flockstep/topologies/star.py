"""Star: worker 0 exchanges with all other workers."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Graph, graph_of


@dataclass(frozen=True)
class StarGraph(Topology):
    """A star with worker 0 at the center. Each edge has weight 1/n, and every other worker gives itself the weight 1 -
    1/n.
    """

    def graph(self, n: int) -> Graph:
        """Return the graph with the edges (0, i) for every worker i from 1 to n - 1."""
        require_workers(n)
        return graph_of(n, ((0, i) for i in range(1, n)))
