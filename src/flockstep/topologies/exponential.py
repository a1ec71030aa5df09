"""Exponential graph: each worker has neighbors at distances 1, 2, 4 and so on."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from flockstep.topologies.base import Topology, require_workers


@dataclass(frozen=True)
class ExponentialGraph(Topology):
    """Worker i exchanges with the workers i ± 2ᵏ mod n for every 2ᵏ < n; the graph is static and undirected (after Ying
    et al. 2021).

    Every worker has about 2 log₂ n neighbors. The spectral gap falls as 1 / log n, that of a ring as 1 / n².
    """

    def graph(self, n: int) -> nx.Graph:
        """Return the graph with the edges (i, i + 2ᵏ mod n), for every worker i and every 2ᵏ < n. Worker i is also the
        end of the edge that begins at i - 2ᵏ.
        """
        require_workers(n)
        graph = nx.empty_graph(n)
        for k in range((n - 1).bit_length()):
            graph.add_edges_from((i, (i + 2**k) % n) for i in range(n))
        return graph
