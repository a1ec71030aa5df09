"""Ring: every worker exchanges with the worker before it and the worker after it."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from flockstep.topologies.base import Topology, require_workers


@dataclass(frozen=True)
class RingGraph(Topology):
    """A ring of n workers, with weight 1/3 for the worker and for each neighbor (D-PSGD: Lian et al. 2017).

    Two workers share one edge, with weights 1/2.
    """

    def graph(self, n: int) -> nx.Graph:
        """Return the cycle with the edges (i, i + 1 mod n); a path for at most two workers."""
        require_workers(n)
        return nx.cycle_graph(n) if n > 2 else nx.path_graph(n)
