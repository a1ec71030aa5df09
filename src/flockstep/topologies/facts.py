"""Properties of a topology, computed from its mixing matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce

import numpy as np
import numpy.typing as npt

from flockstep.topologies.base import Topology, spectral_gap
from flockstep.topologies.graph import adjacency, colors, is_connected

TOLERANCE = 1e-9
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Facts:
    """Properties of a topology on a given number of workers.

    For a topology that changes over time, the properties hold at every step of its period.
    """

    symmetric: bool
    """Whether W = Wᵀ: worker i gives the model of j the same weight as j gives the model of i."""
    row_stochastic: bool
    """Whether the rows of W sum to one and no weight is negative, so that mixing leaves equal replicas equal."""
    column_stochastic: bool
    """Whether the columns of W sum to one and no weight is negative, so that mixing keeps the sum over the workers."""
    directed: bool
    """Whether some edge has only one direction at some step."""
    connected: bool
    """Whether every worker reaches every other worker along the edges that are used within a period."""
    bipartite: bool
    """Whether the graph is bipartite: its workers can be divided into two sets so that every edge joins the two
    sets.
    """
    period: int
    """Number of steps after which the mixing matrices repeat; 1 if they never change."""
    matrices: tuple[Matrix, ...] = field(repr=False, compare=False)
    """Mixing matrices W of one period, in order."""

    @cached_property
    def spectral_gap(self) -> float:
        """Spectral gap 1 - rho, where rho is the factor by which mixing over a whole period shrinks disagreement
        asymptotically.
        """
        return spectral_gap(reduce(lambda product, w: w @ product, self.matrices))

    @property
    def doubly_stochastic(self) -> bool:
        """Whether the rows and the columns of W sum to one, so that mixing keeps the mean and leaves equal replicas
        equal.
        """
        return self.row_stochastic and self.column_stochastic


@lru_cache(maxsize=64)
def mixing(topology: Topology, n: int) -> tuple[Matrix, ...]:
    """Return the read-only mixing matrices of one period of `topology`; they are computed once per process."""
    matrices = tuple(np.array(weights, np.float64) for weights in topology.schedule(n))
    for weights in matrices:
        weights.flags.writeable = False
    return matrices


@lru_cache(maxsize=64)
def facts(topology: Topology, n: int) -> Facts:
    """Return the properties of `topology` on n workers.

    Raises:
        ConfigurationError: the topology does not exist for this n.
    """
    matrices, edges = mixing(topology, n), adjacency(topology.graph(n))
    return Facts(
        symmetric=all(np.abs(w - w.T).max() <= TOLERANCE for w in matrices),
        row_stochastic=all(_sums_to_one(w, axis=1) for w in matrices),
        column_stochastic=all(_sums_to_one(w, axis=0) for w in matrices),
        directed=any(bool(((w > 0) != (w > 0).T).any()) for w in matrices),
        connected=is_connected(edges),
        bipartite=colors(edges) is not None,
        period=len(matrices),
        matrices=matrices,
    )


def hearing(weights: Matrix, rank: int) -> list[int]:
    """Return the workers to which worker `rank` sends, starting with the next rank, so that on a ring no worker
    receives from two workers at once.
    """
    n = len(weights)
    return sorted((int(j) for j in np.flatnonzero(weights[:, rank]) if j != rank), key=lambda j: (j - rank) % n)


def stated(topology: Topology, n: int) -> str:
    """Return text that states the properties of `topology` on n workers."""
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
