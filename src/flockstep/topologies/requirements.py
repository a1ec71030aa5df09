"""Checks that a topology has the properties that a strategy needs; an error names a topology that has them."""

from __future__ import annotations

import numpy as np

from flockstep.errors import ConfigurationError
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import facts, mixing
from flockstep.topologies.graph import adjacency, colors


def require_doubly_stochastic(topology: Topology, n: int, who: str) -> None:
    """Check that the mixing matrix is doubly stochastic at every step, so that mixing keeps the mean.

    Raises:
        ConfigurationError: the matrix of some step is not doubly stochastic.
    """
    if not facts(topology, n).doubly_stochastic:
        raise ConfigurationError(
            f"{who} needs a doubly stochastic mixing matrix, got {_off(topology, n)}; use a topology with "
            "Metropolis–Hastings weights, such as ring or torus, or the strategy sgp, which corrects for unequal "
            "column sums"
        )


def require_symmetric(topology: Topology, n: int, who: str) -> None:
    """Check that the mixing matrix is symmetric at every step.

    Raises:
        ConfigurationError: the matrix of some step is not symmetric.
    """
    found = facts(topology, n)
    if not found.symmetric:
        what = "one-way edges" if found.directed else "a weight that differs between the two directions of an edge"
        raise ConfigurationError(
            f"{who} needs a symmetric mixing matrix, got {what}; use an undirected graph such as ring, torus or "
            "exponential, or the strategy sgp, which accepts directed edges"
        )


def require_column_stochastic(topology: Topology, n: int, who: str) -> None:
    """Check that the mixing matrix is column-stochastic at every step, so that mixing keeps the sum.

    Raises:
        ConfigurationError: the matrix of some step is not column-stochastic.
    """
    if not facts(topology, n).column_stochastic:
        raise ConfigurationError(
            f"{who} needs a column-stochastic mixing matrix, got {_off(topology, n)}; let the weights of each worker "
            "for itself and its out-neighbors sum to one, as in one_peer_exponential or graph(edges='0>1 1>2 2>0')"
        )


def sides(topology: Topology, n: int, who: str) -> tuple[list[int], list[int]]:
    """Return the two sides of a bipartite topology, the larger side first; if both are equal, the side of worker 0 is
    first.

    Raises:
        ConfigurationError: an edge is one-way, the edges change over time, or the graph is not bipartite.
    """
    found, side = facts(topology, n), colors(adjacency(topology.graph(n)))
    if found.directed or found.period > 1:
        what = "one-way edges" if found.directed else f"edges that change over {found.period} steps"
        raise ConfigurationError(f"{who} needs a fixed undirected graph, got {what}; use ring, tree or star")
    if side is None:
        raise ConfigurationError(
            f"{who} needs a bipartite graph, got a cycle of odd length among {n} workers; use a ring of even size, "
            "a tree, a star, or a complete bipartite graph given as graph(edges='0-1 0-3 2-1 2-3')"
        )
    one, other = np.flatnonzero(~side).tolist(), np.flatnonzero(side).tolist()
    return (one, other) if len(one) >= len(other) else (other, one)


def _off(topology: Topology, n: int) -> str:
    """Return the deviation of the row and column sums from one, for an error message."""
    matrices = mixing(topology, n)
    rows, columns = (max(float(np.abs(w.sum(axis) - 1).max()) for w in matrices) for axis in (1, 0))
    least = min(float(w.min()) for w in matrices)
    return f"row sums off by {rows:.2g}, column sums off by {columns:.2g} and a smallest weight of {least:.2g}"
