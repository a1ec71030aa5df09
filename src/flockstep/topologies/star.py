"""Star: worker 0 exchanges with all other workers."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from flockstep.topologies.base import Topology, require_workers


@dataclass(frozen=True)
class StarGraph(Topology):
    """A star with worker 0 at the center. Each edge has weight 1/n, and every other worker gives itself the weight 1 -
    1/n.
    """

    def graph(self, n: int) -> nx.Graph:
        """Return the graph with the edges (0, i) for every worker i from 1 to n - 1."""
        require_workers(n)
        return nx.star_graph(n - 1)
