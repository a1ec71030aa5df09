"""Random regular graph: every worker has the same number of random neighbors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from flockstep.errors import ConfigurationError, require
from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Edge, Graph, adjacency, graph_of, is_connected

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

    def graph(self, n: int) -> Graph:
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
            graph = graph_of(n, sorted(drawn_by_pairing(self.d, n, Random(self.seed * DRAWS + draw))))  # noqa: S311 - no secret
            if is_connected(adjacency(graph)):
                return graph
        raise ConfigurationError(
            f"random_regular found no connected graph with d = {self.d} on {n} workers in {DRAWS} draws; use d = 3"
        )


def drawn_by_pairing(d: int, n: int, random: Random) -> set[Edge]:
    """Draw a graph in which every node has d edges: d ends of edges per node are shuffled and paired, again and again
    for the pairs that would be loops or double edges; from the start where no other pair is left.

    The numbers are drawn, and an attempt is given up, as networkx does both, so that a seed means one graph everywhere.
    """
    while True:
        edges, ends = set[Edge](), list(range(n)) * d
        while ends:
            random.shuffle(ends)
            left: dict[int, int] = {}  # node → its ends without an edge, in the order in which they were met
            for pair in zip(ends[::2], ends[1::2], strict=True):
                low, high = min(pair), max(pair)
                if low != high and (low, high) not in edges:
                    edges.add((low, high))
                else:
                    left[low] = left.get(low, 0) + 1
                    left[high] = left.get(high, 0) + 1
            if left and not _has_free_pair(left, edges):
                break
            ends = [node for node, count in left.items() for _ in range(count)]
        else:
            return edges


def _has_free_pair(nodes: Iterable[int], edges: set[Edge]) -> bool:
    """Whether a pair of nodes without an edge is found: each node meets those before it, and the smaller goes on."""
    for node in nodes:
        for other in nodes:
            if node == other:
                break
            node, high = min(node, other), max(node, other)
            if (node, high) not in edges:
                return True
    return False
