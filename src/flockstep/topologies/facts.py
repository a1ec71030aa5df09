"""What holds of a topology: computed from its matrices, never claimed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce

import networkx as nx
import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.topologies.base import Topology, spectral_gap

TOLERANCE = 1e-9
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Facts:
    """Properties of a topology on a given number of workers; of one that changes, of every step of its period."""

    symmetric: bool
    """W = Wᵀ: what i gives to j's model, j gives to i's."""
    row_stochastic: bool
    """Rows sum to one, none negative: replicas that agree stay as they are."""
    column_stochastic: bool
    """Columns sum to one, none negative: what is sent arrives in full, and the sum over the workers stays."""
    directed: bool
    """At some step an edge goes one way only."""
    connected: bool
    """Over a period, everyone reaches everyone along the edges' directions."""
    bipartite: bool
    """Two colours suffice so that no edge joins workers of one colour."""
    period: int
    """Steps after which the matrices repeat; 1: always the same."""
    spectral_gap: float
    """1 - rho, where rho is the factor by which a whole period shrinks disagreement (in the long run)."""

    @property
    def doubly_stochastic(self) -> bool:
        """Rows and columns sum to one: mixing keeps the mean, and replicas that agree stay as they are."""
        return self.row_stochastic and self.column_stochastic


@lru_cache(maxsize=64)
def mixing(topology: Topology, n: int) -> tuple[Matrix, ...]:
    """The matrices of one period, read-only, made once for all workers of a process."""
    matrices = tuple(np.array(weights, np.float64) for weights in topology.schedule(n))
    for weights in matrices:
        weights.flags.writeable = False
    return matrices


@lru_cache(maxsize=64)
def facts(topology: Topology, n: int) -> Facts:
    """What holds of `topology` on n workers.

    Raises:
        ConfigurationError: it does not exist for this n.
    """
    matrices, graph = mixing(topology, n), topology.graph(n)
    directed = graph.is_directed()
    both_ways = graph.to_undirected() if directed else graph
    return Facts(
        symmetric=all(np.abs(w - w.T).max() <= TOLERANCE for w in matrices),
        row_stochastic=all(_sums_to_one(w, axis=1) for w in matrices),
        column_stochastic=all(_sums_to_one(w, axis=0) for w in matrices),
        directed=any(bool(((w > 0) != (w > 0).T).any()) for w in matrices),
        connected=nx.is_strongly_connected(graph) if directed else nx.is_connected(graph),
        bipartite=nx.is_bipartite(both_ways),
        period=len(matrices),
        spectral_gap=spectral_gap(reduce(lambda product, w: w @ product, matrices)),
    )


def require_doubly_stochastic(topology: Topology, n: int, who: str) -> None:
    """Raise `ConfigurationError` unless mixing keeps the mean and agreement, at every step."""
    if not facts(topology, n).doubly_stochastic:
        raise ConfigurationError(
            f"{who} needs a doubly stochastic mixing matrix, got {_off(topology, n)}; use a topology with "
            "Metropolis–Hastings weights, such as ring or torus, or sgp, which corrects for rows"
        )


def require_symmetric(topology: Topology, n: int, who: str) -> None:
    """Raise `ConfigurationError` unless what i gives to j's model, j gives to i's, at every step."""
    found = facts(topology, n)
    if not found.symmetric:
        what = "one-way edges" if found.directed else "other weights one way than the other"
        raise ConfigurationError(
            f"{who} needs a symmetric mixing matrix, got {what}; use an undirected graph such as ring, torus or "
            "exponential, or sgp, which takes one-way edges"
        )


def require_column_stochastic(topology: Topology, n: int, who: str) -> None:
    """Raise `ConfigurationError` unless what is sent arrives in full, at every step."""
    if not facts(topology, n).column_stochastic:
        raise ConfigurationError(
            f"{who} needs a column-stochastic mixing matrix, got {_off(topology, n)}; let each worker's weights for "
            "all that hear it and for itself sum to one, as in one_peer_exponential or graph(edges='0>1 1>2 2>0')"
        )


def sides(topology: Topology, n: int, who: str) -> tuple[list[int], list[int]]:
    """The two sides of a bipartite topology, the larger one first (of equal ones, that of worker 0).

    Raises:
        ConfigurationError: an edge goes one way only, the edges change over time, or two sides do not suffice.
    """
    found, graph = facts(topology, n), topology.graph(n)
    if found.directed or found.period > 1:
        what = "one-way edges" if found.directed else f"edges that change over {found.period} steps"
        raise ConfigurationError(f"{who} needs a fixed undirected graph, got {what}; use ring, torus or tree")
    if not found.bipartite:
        raise ConfigurationError(
            f"{who} needs a bipartite graph, got a cycle of odd length among {n} workers; use a ring of even size, "
            "a tree, a star, or a complete bipartite graph given as graph(edges='0-1 0-3 2-1 2-3')"
        )
    colours = nx.bipartite.color(graph)
    one = [rank for rank in range(n) if colours[rank] == colours[0]]
    other = [rank for rank in range(n) if colours[rank] != colours[0]]
    return (one, other) if len(one) >= len(other) else (other, one)


def _sums_to_one(weights: Matrix, axis: int) -> bool:
    return bool(np.abs(weights.sum(axis) - 1).max() <= TOLERANCE and weights.min() >= 0)


def _off(topology: Topology, n: int) -> str:
    """By how much the sums miss one, for a message."""
    matrices = mixing(topology, n)
    rows, columns = (max(float(np.abs(w.sum(axis) - 1).max()) for w in matrices) for axis in (1, 0))
    least = min(float(w.min()) for w in matrices)
    return f"row sums off by {rows:.2g}, column sums off by {columns:.2g} and a least weight of {least:.2g}"
