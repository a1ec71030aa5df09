"""Star: worker 0 exchanges with all the others."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from flockstep.topologies.base import Topology, require_workers


@dataclass(frozen=True)
class StarGraph(Topology):
    """Worker 0 in the centre, with weight 1/n to and from each other worker; these keep 1 - 1/n for themselves."""

    def graph(self, n: int) -> nx.Graph:
        """Edges (0, i)."""
        require_workers(n)
        return nx.star_graph(n - 1)
