"""What holds of a topology: computed from its matrices, never claimed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce

import networkx as nx
import numpy as np
import numpy.typing as npt

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
    matrices: tuple[Matrix, ...] = field(repr=False, compare=False)
    """Those of a period."""

    @cached_property
    def spectral_gap(self) -> float:
        """1 - rho, where rho is the factor by which a whole period shrinks disagreement (in the long run)."""
        return spectral_gap(reduce(lambda product, w: w @ product, self.matrices))

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
        matrices=matrices,
    )


def hearing(weights: Matrix, rank: int) -> list[int]:
    """The others that hear `rank`, from the next rank on: in this order no two workers of a ring send to the same."""
    n = len(weights)
    return sorted((int(j) for j in np.flatnonzero(weights[:, rank]) if j != rank), key=lambda j: (j - rank) % n)


def stated(topology: Topology, n: int) -> str:
    """What holds of `topology` on n workers, in words."""
    found = facts(topology, n)
    sums = {(True, True): "doubly", (True, False): "row-", (False, True): "column-"}
    kind = sums.get((found.row_stochastic, found.column_stochastic), "not")
    words = [
        "symmetric" if found.symmetric else "one-way" if found.directed else "not symmetric",
        f"{kind}{'' if kind.endswith('-') else ' '}stochastic",
        "bipartite" if found.bipartite else "not bipartite",
        f"spectral gap {found.spectral_gap:.3g}" + (f" over {found.period} steps" if found.period > 1 else ""),
    ]
    return ", ".join(words)


def _sums_to_one(weights: Matrix, axis: int) -> bool:
    return bool(np.abs(weights.sum(axis) - 1).max() <= TOLERANCE and weights.min() >= 0)
