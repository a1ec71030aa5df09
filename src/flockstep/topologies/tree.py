"""Tree: every worker exchanges with its parent and its children."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import require
from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Graph, graph_of


@dataclass(frozen=True)
class TreeGraph(Topology):
    """A complete tree in order of rank: worker i > 0 is a child of (i - 1) div branching.

    The tree is bipartite for any n.
    """

    branching: int = 2

    def __post_init__(self) -> None:
        require(self.branching >= 1, "branching", ">= 1", self.branching, "use 2 for a binary tree")

    def graph(self, n: int) -> Graph:
        """Return the graph with an edge between every worker and each of its children."""
        require_workers(n)
        return graph_of(n, (((i - 1) // self.branching, i) for i in range(1, n)))
