"""Graphs on workers: edges, the matrix of who sends to whom, and what follows from the matrix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Edge = tuple[int, int]
Adjacency = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Graph:
    """A graph on nodes 0..n-1. An edge (i, j) of a directed graph means that i sends to j; otherwise both send."""

    n: int
    edges: tuple[Edge, ...]
    directed: bool = False

    @property
    def nodes(self) -> range:
        """The nodes, which are the ranks of the workers, in order."""
        return range(self.n)

    def is_directed(self) -> bool:
        """Return whether edges have one direction."""
        return self.directed


def graph_of(n: int, edges: Iterable[Edge], directed: bool = False) -> Graph:
    """Return the graph with the given edges, each of them once."""
    kept = dict.fromkeys(edge if directed or edge[0] <= edge[1] else (edge[1], edge[0]) for edge in edges)
    return Graph(n, tuple(kept), directed)


def adjacency(graph: Graph | Any) -> Adjacency:
    """Return the matrix A (n, n) with A[i, j] if i sends to j, for a graph of this module or of networkx."""
    found = np.zeros((len(graph.nodes), len(graph.nodes)), np.bool_)
    for i, j in graph.edges:
        found[i, j] = True
    return found if graph.is_directed() else found | found.T


def is_connected(edges: Adjacency) -> bool:
    """Return whether every node reaches every other node along the edges: from node 0 all, and all node 0."""
    return bool(_reached(edges).all() and _reached(edges.T).all())


def _reached(edges: Adjacency) -> npt.NDArray[np.bool_]:
    """The nodes that node 0 reaches."""
    seen = np.zeros(len(edges), np.bool_)
    ahead = [0]
    seen[0] = True
    while ahead:
        new = np.flatnonzero(edges[ahead].any(axis=0) & ~seen)
        seen[new] = True
        ahead = new.tolist()
    return seen


def colors(edges: Adjacency) -> npt.NDArray[np.bool_] | None:
    """Return the side of every node of a bipartite graph, False for the first node of each part that is connected;
    None if an edge joins two nodes of one side. Directions of edges do not count.
    """
    both = edges | edges.T
    side = np.full(len(edges), -1)
    for start in range(len(edges)):
        if side[start] >= 0:
            continue
        side[start], ahead = 0, [start]
        while ahead:
            new = np.flatnonzero(both[ahead].any(axis=0) & (side < 0))
            side[new] = 1 - side[ahead[0]]  # all nodes ahead are at one distance from the start
            ahead = new.tolist()
    return None if (both & (side[:, None] == side)).any() else side == 1
