"""The interface of a topology."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.expression import Component
from flockstep.topologies.graph import Graph, adjacency


class Topology(Component):
    """The workers that exchange with each other: a graph on n workers, with a mixing matrix W.

    `W[i, j]` is the weight with which worker i mixes in what it receives from worker j. W is zero off the graph's
    edges; in a directed graph, an edge i → j means that i sends to j. By default the graph is undirected and W has
    Metropolis–Hastings weights (Xiao & Boyd 2004): symmetric and doubly stochastic on any connected graph.
    `flockstep.topologies.facts` computes the properties of a topology.
    """

    noun: ClassVar[str] = "topology"

    @abstractmethod
    def graph(self, n: int) -> Graph:
        """Return the connected graph on nodes 0..n-1, with every edge that is ever used; a networkx graph serves too.

        Raises:
            ConfigurationError: the graph does not exist for this n.
        """

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        """Return the n × n mixing matrix W; for a graph that changes over time, the mean over a period."""
        return metropolis_hastings(self.graph(n))

    def schedule(self, n: int) -> tuple[npt.NDArray[np.float64], ...]:
        """Return the mixing matrices of one period, step by step; a single matrix if the graph does not change over
        time.
        """
        return (self.weights(n),)

    def neighbors(self, n: int, rank: int) -> list[int]:
        """Return the workers with which worker `rank` exchanges in either direction, in ascending order."""
        edges = adjacency(self.graph(n))
        return [int(j) for j in np.flatnonzero(edges[rank] | edges[:, rank]) if j != rank]


def metropolis_hastings(graph: Graph) -> npt.NDArray[np.float64]:
    """Return W with W[i, j] = 1 / (1 + max(deg i, deg j)) on edges; each diagonal element is one minus the rest of its
    row.
    """
    edges = adjacency(graph)
    degrees = edges.sum(axis=1)
    weights: npt.NDArray[np.float64] = np.where(edges, 1.0 / (1 + np.maximum(degrees[:, None], degrees)), 0.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights


def spectral_gap(weights: npt.NDArray[np.float64]) -> float:
    """Return 1 - rho, where rho = max(|lambda_2|, |lambda_n|) is the factor by which one mixing shrinks disagreement.

    For a matrix that is not symmetric, rho is the asymptotic factor.
    """
    magnitudes = np.sort(np.abs(np.linalg.eigvals(weights)))[::-1]
    return float(1.0 - magnitudes[1]) if len(magnitudes) > 1 else 1.0


def require_workers(n: int) -> None:
    """Check that there is at least one worker.

    Raises:
        ConfigurationError: n < 1.
    """
    if n < 1:
        raise ConfigurationError(f"a topology needs >= 1 worker, got {n}; use 1 to train alone")
