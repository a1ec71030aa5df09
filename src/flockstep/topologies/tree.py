"""Tree: every worker exchanges with its parent and its children."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from flockstep.errors import require
from flockstep.topologies.base import Topology, require_workers


@dataclass(frozen=True)
class TreeGraph(Topology):
    """A complete tree in order of rank: worker i > 0 is a child of (i - 1) div branching.

    The tree is bipartite for any n.
    """

    branching: int = 2

    def __post_init__(self) -> None:
        require(self.branching >= 1, "branching", ">= 1", self.branching, "use 2 for a binary tree")

    def graph(self, n: int) -> nx.Graph:
        """Return the graph with an edge between every worker and each of its children."""
        require_workers(n)
        graph = nx.empty_graph(n)
        graph.add_edges_from(((i - 1) // self.branching, i) for i in range(1, n))
        return graph
