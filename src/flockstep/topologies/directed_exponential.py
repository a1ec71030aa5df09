"""Directed exponential graph: every worker sends to the workers that are 1, 2, 4 and so on ranks away."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Graph, graph_of


@dataclass(frozen=True)
class DirectedExponentialGraph(Topology):
    """Worker i sends equal parts to the workers i + 2ᵏ mod n for every 2ᵏ < n; the graph is static and directed (Assran
    et al. 2019).

    W is doubly stochastic but not symmetric.
    """

    def graph(self, n: int) -> Graph:
        """Return the graph with the edges i → i + 2ᵏ mod n, for every worker i and every 2ᵏ < n."""
        require_workers(n)
        return graph_of(n, ((i, (i + hop) % n) for hop in hops(n) for i in range(n)), directed=True)

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        """Return 1 / (1 + number of peers) on edges and on the diagonal."""
        require_workers(n)
        own = np.eye(n)
        total: npt.NDArray[np.float64] = own + sum(np.roll(own, hop, axis=0) for hop in hops(n))
        return total / (1 + len(hops(n)))


def hops(n: int) -> list[int]:
    """Return the powers of two below n, which are the distances of the edges."""
    return [2**k for k in range((n - 1).bit_length())]
