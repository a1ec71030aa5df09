"""Hierarchical graph: groups in which all workers exchange, joined by their first members."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from flockstep.errors import ConfigurationError, require
from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Graph, graph_of


@dataclass(frozen=True)
class HierarchicalGraph(Topology):
    """A graph of `groups` nearly equal groups of consecutive workers; edges join all pairs in a group, and all pairs of
    first members.

    The graph fits machines with several devices each: only the first worker of a group exchanges with other groups.
    """

    groups: int = 2

    def __post_init__(self) -> None:
        require(self.groups >= 1, "groups", ">= 1", self.groups, "use 1 for a complete graph")

    def graph(self, n: int) -> Graph:
        """Return the graph with the edges inside groups and the edges among the groups' first members.

        Raises:
            ConfigurationError: there are fewer workers than groups.
        """
        require_workers(n)
        if n < self.groups:
            raise ConfigurationError(
                f"{self.groups} groups need at least {self.groups} workers, got {n}; use hierarchical({n})"
            )
        members = [part.tolist() for part in np.array_split(np.arange(n), self.groups)]
        groups = *members, [group[0] for group in members]
        return graph_of(n, (pair for group in groups for pair in combinations(group, 2)))
