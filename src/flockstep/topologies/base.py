"""The contract of a topology."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import networkx as nx
import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.expression import Component


class Topology(Component):
    """Who talks to whom: an undirected graph on n workers and the mixing matrix W on it.

    `W[i, j]` is the weight worker i gives to what it hears from worker j; W is zero off the graph's edges.
    Unless a subclass says otherwise, W has Metropolis–Hastings weights (Xiao & Boyd 2004): symmetric and doubly
    stochastic on any connected graph.
    """

    noun: ClassVar[str] = "topology"

    @abstractmethod
    def graph(self, n: int) -> nx.Graph:
        """The connected graph on nodes 0..n-1.

        Raises:
            ConfigurationError: the graph does not exist for this n.
        """

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        """The n × n mixing matrix W."""
        return metropolis_hastings(self.graph(n))

    def neighbours(self, n: int, rank: int) -> list[int]:
        """The workers that `rank` exchanges with, in ascending order."""
        return sorted(int(j) for j in self.graph(n).neighbors(rank) if j != rank)


def metropolis_hastings(graph: nx.Graph) -> npt.NDArray[np.float64]:
    """W[i, j] = 1 / (1 + max(deg i, deg j)) on edges, the rest of each row on its diagonal."""
    n = graph.number_of_nodes()
    weights = np.zeros((n, n))
    for i, j in graph.edges:
        if i != j:
            weights[i, j] = weights[j, i] = 1.0 / (1 + max(graph.degree[i], graph.degree[j]))
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights


def spectral_gap(weights: npt.NDArray[np.float64]) -> float:
    """1 - rho, where rho = max(|lambda_2|, |lambda_n|) is the factor by which one mixing shrinks disagreement."""
    magnitudes = np.sort(np.abs(np.linalg.eigvals(weights)))[::-1]
    return float(1.0 - magnitudes[1]) if len(magnitudes) > 1 else 1.0


def require_doubly_stochastic(weights: npt.NDArray[np.float64], who: str) -> None:
    """Raise `ConfigurationError` unless rows and columns of W sum to one and none is negative."""
    rows, columns = np.abs(weights.sum(1) - 1).max(), np.abs(weights.sum(0) - 1).max()
    if rows > 1e-9 or columns > 1e-9 or weights.min() < 0:
        raise ConfigurationError(
            f"{who} needs a doubly stochastic mixing matrix, got row sums off by {rows:.2g} and column sums off by "
            f"{columns:.2g}; use a topology with Metropolis–Hastings weights, such as ring or torus"
        )


def require_workers(n: int) -> None:
    """Raise `ConfigurationError` unless there is at least one worker."""
    if n < 1:
        raise ConfigurationError(f"a topology needs >= 1 workers, got {n}; use 1 to train alone")
