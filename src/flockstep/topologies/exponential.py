"""Exponential graph: each worker has neighbors at distances 1, 2, 4 and so on."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Graph, graph_of


@dataclass(frozen=True)
class ExponentialGraph(Topology):
    """Worker i exchanges with the workers i ± 2ᵏ mod n for every 2ᵏ < n; the graph is static and undirected (after Ying
    et al. 2021).

    Every worker has about 2 log₂ n neighbors. The spectral gap falls as 1 / log n, that of a ring as 1 / n².
    """

    def graph(self, n: int) -> Graph:
        """Return the graph with the edges (i, i + 2ᵏ mod n), for every worker i and every 2ᵏ < n. Worker i is also the
        end of the edge that begins at i - 2ᵏ.
        """
        require_workers(n)
        return graph_of(n, ((i, (i + 2**k) % n) for k in range((n - 1).bit_length()) for i in range(n)))
