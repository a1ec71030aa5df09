"""A custom graph, given by an edge list, by a file, or by networkx, which is imported for its files alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.topologies.base import Topology, metropolis_hastings, require_workers
from flockstep.topologies.graph import Edge, Graph, adjacency, is_connected

_EDGE = re.compile(r"(\d+)([->])(\d+)(?::(\S+))?")
EXAMPLE = "0-1 1-2 2-3 3-0"


@dataclass(frozen=True)
class WeightedGraph(Topology):
    """A custom graph: `edges` such as '0-1:0.25 1-2:0.5', one-way as '0>1', or a file with edges, GraphML or JSON.

    The weight of an edge is the weight that the receiver gives to what it receives. The diagonal is given as '0-0:0.5',
    or is one minus a sum of other weights: of all edges on which the worker sends if edges are one-way
    (column-stochastic, for push-sum), otherwise of all edges of the worker. Without weights: Metropolis–Hastings, or
    equal parts of what is sent if edges are one-way. Files: .graphml; .json with node-link data as networkx writes it;
    any other file is an edge list. Every host with a worker reads the file. Nodes that are not numbered 0..n-1 are
    numbered in the order of the file.
    """

    edges: str = EXAMPLE
    path: str = ""

    def __post_init__(self) -> None:
        if self.path and self.edges != EXAMPLE:
            raise ConfigurationError(f"graph takes either edges or a path, got both ({self.path}); leave one out")
        if not self.path:
            _parse(self.edges)

    def graph(self, n: int) -> Graph:
        """Return the graph without self-loops.

        Raises:
            ConfigurationError: the graph has another number of nodes or is not connected, or the file cannot be read.
        """
        return self._read(n).without_loops()

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        """Return the given weights, or the default weights of the graph if none are given.

        Raises:
            ConfigurationError: weights are negative, not finite, above one in total, or given for only some of the
                edges.
        """
        found = self._read(n)
        given = found.weights.values()
        if all(weight is None for weight in given):
            graph = found.without_loops()
            if not found.directed:
                return metropolis_hastings(graph)
            heard = adjacency(graph).T + np.eye(n)  # equal parts for all that i sends to and for i itself
            return np.asarray(heard / heard.sum(axis=0))
        weights = np.zeros((n, n))
        for (i, j), weight in found.weights.items():
            if weight is None or not 0 <= weight < math.inf or (weight == 0 and i != j):
                raise ConfigurationError(
                    f"{self} must have weights > 0 on all edges or on none; give every edge a finite weight > 0, or "
                    "give none a weight"
                )
            weights[j, i] = weight
            if not found.directed:
                weights[i, j] = weight
        rest = 1 - weights.sum(axis=0)
        if rest.min() < -1e-9:
            worst = int(rest.argmin())
            raise ConfigurationError(
                f"{self}: the edge weights at worker {worst} must sum to at most one, got {1 - rest[worst]:g}; make "
                "them smaller"
            )
        loops = {i for i, j in found.weights if i == j}
        weights[np.diag_indices(n)] += [0.0 if i in loops else max(float(rest[i]), 0.0) for i in range(n)]
        return weights

    def _read(self, n: int) -> _Edges:
        require_workers(n)
        found = _load(Path(self.path)) if self.path else _parse(self.edges)
        if found.n != n:
            raise ConfigurationError(f"{self} has {found.n} nodes, got {n} workers; use -n {found.n}")
        if not is_connected(adjacency(found.without_loops())):
            raise ConfigurationError(f"{self} is not connected; add edges until every worker reaches every other")
        return found


@dataclass(frozen=True)
class _Edges:
    """The edges of a graph on nodes 0..n-1, each with its weight if it has one."""

    n: int
    weights: Mapping[Edge, float | None]
    directed: bool

    def without_loops(self) -> Graph:
        return Graph(self.n, tuple((i, j) for i, j in self.weights if i != j), self.directed)


def from_networkx(graph: Any) -> WeightedGraph:
    """Return the topology of a networkx graph; if all edges have an attribute `weight`, these weights form W.

    Nodes that are not numbered 0..n-1 are numbered in the graph's order.
    """
    found = _of_networkx(graph)
    arrow = ">" if found.directed else "-"
    written = [f"{i}{arrow}{j}" + ("" if w is None else f":{w!r}") for (i, j), w in found.weights.items()]
    return WeightedGraph(" ".join(written) if written else "0-0")


def _of_networkx(graph: Any) -> _Edges:
    weights = {(str(i), str(j)): None if w is None else float(w) for i, j, w in graph.edges(data="weight")}
    return _numbered([str(node) for node in graph.nodes], weights, graph.is_directed())


def _numbered(names: Sequence[str], weights: Mapping[tuple[str, str], float | None], directed: bool) -> _Edges:
    """Return the edges between nodes 0..n-1: the names themselves if they are these numbers, otherwise their order."""
    numbers = {str(i): i for i in range(len(names))}
    if set(names) != set(numbers):
        numbers = {name: i for i, name in enumerate(names)}
    return _Edges(len(names), {(numbers[i], numbers[j]): weight for (i, j), weight in weights.items()}, directed)


def _parse(text: str) -> _Edges:
    """Return the graph of an edge list.

    Raises:
        ConfigurationError: the text is not an edge list, or gives an edge two weights.
    """
    words = [_EDGE.fullmatch(word) for word in text.replace(",", " ").split()]
    arrows = {word[2] for word in words if word}
    if not words or None in words or len(arrows) > 1:
        raise ConfigurationError(
            f"edges must be a list like '0-1 1-2:0.25', or '0>1 1>0' for one direction, got {text[:80]!r}"
        )
    directed, weights = arrows == {">"}, dict[tuple[str, str], float | None]()
    for i, _, j, written in (word.groups() for word in words if word):
        try:
            weight = float(written) if written else None
        except ValueError:
            raise ConfigurationError(f"a weight must be a number, got {text[:80]!r}; write it like 0-1:0.25") from None
        edge = str(int(i)), str(int(j))
        edge = edge if directed or edge[::-1] not in weights else edge[::-1]
        if weights.setdefault(edge, weight) != weight:
            raise ConfigurationError(
                f"an edge may have only one weight, got two weights for one edge in {text[:80]!r}; leave one out"
            )
    return _numbered(list(dict.fromkeys(name for edge in weights for name in edge)), weights, directed)


def _load(path: Path) -> _Edges:
    """Return the graph of a file.

    Raises:
        ConfigurationError: the file cannot be read as a graph, or networkx is missing.
    """
    try:
        if path.suffix not in (".graphml", ".json"):
            return _parse(path.read_text("utf-8"))
        import networkx as nx

        if path.suffix == ".graphml":
            return _of_networkx(nx.read_graphml(path))
        return _of_networkx(nx.node_link_graph(json.loads(path.read_text("utf-8")), edges="edges"))
    except ImportError:
        raise ConfigurationError(
            f"{path} is read with networkx, which is not installed; pip install 'flockstep[graphs]', or write a list "
            "of edges, such as 0-1 1-2 2-0, into a file"
        ) from None
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"cannot read a graph from {path}: {error}; write the file with networkx") from error
