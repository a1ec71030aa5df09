"""Random regular graph: every worker has the same number of random neighbors."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from flockstep.errors import ConfigurationError, require
from flockstep.topologies.base import Topology, require_workers

DRAWS = 100


@dataclass(frozen=True)
class RandomRegularGraph(Topology):
    """Every worker has d neighbors, drawn with `seed` (Steger & Wormald 1999); the same seed gives the same graph.

    For d >= 3 the spectral gap hardly falls with n; it is among the largest that d neighbors allow.
    """

    d: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.d >= 1, "d", ">= 1", self.d, "use 3 for a graph that mixes well")
        require(self.seed >= 0, "seed", ">= 0", self.seed, "use any integer >= 0")

    def graph(self, n: int) -> nx.Graph:
        """Return the first of at most 100 random graphs that is connected.

        Raises:
            ConfigurationError: n d is odd, n <= d, or no draw was connected, as with d = 1.
        """
        require_workers(n)
        if n <= self.d or n * self.d % 2:
            why = f"more than d = {self.d} workers" if n <= self.d else f"an even product of n and d = {self.d}"
            raise ConfigurationError(
                f"random_regular needs {why}, got n = {n}; use an even n greater than d, or the topology ring"
            )
        for draw in range(DRAWS):
            graph = nx.random_regular_graph(self.d, n, seed=self.seed * DRAWS + draw)
            if nx.is_connected(graph):
                ordered = nx.empty_graph(n)
                ordered.add_edges_from(sorted(graph.edges))
                return ordered
        raise ConfigurationError(
            f"random_regular found no connected graph with d = {self.d} on {n} workers in {DRAWS} draws; use d = 3"
        )
