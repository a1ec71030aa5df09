"""Hierarchical graph: groups in which all workers exchange, joined by their first members."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import networkx as nx
import numpy as np

from flockstep.errors import ConfigurationError, require
from flockstep.topologies.base import Topology, require_workers


@dataclass(frozen=True)
class HierarchicalGraph(Topology):
    """A graph of `groups` nearly equal groups of consecutive workers; edges join all pairs in a group, and all pairs of
    first members.

    The graph fits machines with several devices each: only the first worker of a group exchanges with other groups.
    """

    groups: int = 2

    def __post_init__(self) -> None:
        require(self.groups >= 1, "groups", ">= 1", self.groups, "use 1 for a complete graph")

    def graph(self, n: int) -> nx.Graph:
        """Return the graph with the edges inside groups and the edges among the groups' first members.

        Raises:
            ConfigurationError: there are fewer workers than groups.
        """
        require_workers(n)
        if n < self.groups:
            raise ConfigurationError(
                f"{self.groups} groups need at least {self.groups} workers, got {n}; use hierarchical({n})"
            )
        graph = nx.empty_graph(n)
        members = [part.tolist() for part in np.array_split(np.arange(n), self.groups)]
        for group in (*members, [group[0] for group in members]):
            graph.add_edges_from(combinations(group, 2))
        return graph
