"""A custom graph, given by an edge list, by a file, or by networkx."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.topologies.base import Topology, metropolis_hastings, require_workers

_EDGE = re.compile(r"(\d+)([->])(\d+)(?::(\S+))?")
EXAMPLE = "0-1 1-2 2-3 3-0"


_OF_READERS = (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, SyntaxError, RecursionError)
"""Errors that networkx and the readers of JSON and XML raise for a file that is no graph."""


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

    def graph(self, n: int) -> nx.Graph:
        """Return the graph without self-loops.

        Raises:
            ConfigurationError: the graph has another number of nodes or is not connected, or the file cannot be read.
        """
        graph = self._read(n)
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))
        return graph

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        """Return the given weights, or the default weights of the graph if none are given.

        Raises:
            ConfigurationError: weights are negative, not finite, above one in total, or given for only some of the
                edges.
        """
        graph = self._read(n)
        given = list(graph.edges(data="weight"))
        if all(weight is None for _, _, weight in given):
            graph.remove_edges_from(list(nx.selfloop_edges(graph)))
            return metropolis_hastings(graph) if not graph.is_directed() else _equal_parts(graph)
        if any(w is None or not 0 <= w < math.inf or (w == 0 and i != j) for i, j, w in given):
            raise ConfigurationError(
                f"{self} must have weights > 0 on all edges or on none; give every edge a finite weight > 0, or give "
                "none a weight"
            )
        weights: npt.NDArray[np.float64] = nx.to_numpy_array(graph, nodelist=range(n)).T.copy()
        rest = 1 - weights.sum(axis=0)
        if rest.min() < -1e-9:
            worst = int(rest.argmin())
            raise ConfigurationError(
                f"{self}: the edge weights at worker {worst} must sum to at most one, got {1 - rest[worst]:g}; make "
                "them smaller"
            )
        loops = {i for i, j in graph.edges if i == j}
        weights[np.diag_indices(n)] += [0.0 if i in loops else max(float(rest[i]), 0.0) for i in range(n)]
        return weights

    def _read(self, n: int) -> nx.Graph:
        require_workers(n)
        graph = _load(Path(self.path)) if self.path else _parse(self.edges)
        if len(graph) != n:
            raise ConfigurationError(f"{self} has {len(graph)} nodes, got {n} workers; use -n {len(graph)}")
        if not (nx.is_strongly_connected(graph) if graph.is_directed() else nx.is_connected(graph)):
            raise ConfigurationError(f"{self} is not connected; add edges until every worker reaches every other")
        return graph


def from_networkx(graph: nx.Graph) -> WeightedGraph:
    """Return the topology of a networkx graph; if all edges have an attribute `weight`, these weights form W.

    Nodes that are not numbered 0..n-1 are numbered in the graph's order.
    """
    arrow = ">" if graph.is_directed() else "-"
    numbered = _numbered(graph)
    written = [f"{i}{arrow}{j}" + ("" if w is None else f":{float(w)!r}") for i, j, w in numbered.edges(data="weight")]
    return WeightedGraph(" ".join(written) if written else "0-0")


def _numbered(graph: nx.Graph) -> nx.Graph:
    """Return a copy of the graph with nodes 0..n-1, in order."""
    names = [str(node) for node in graph.nodes]
    order = range(len(names))
    numbers: Mapping[str, int] = {str(i): i for i in order}
    if set(names) != set(numbers):
        numbers = dict(zip(names, order, strict=True))
    copy = nx.DiGraph() if graph.is_directed() else nx.Graph()
    copy.add_nodes_from(order)
    for i, j, weight in graph.edges(data="weight"):
        copy.add_edge(numbers[str(i)], numbers[str(j)], **({} if weight is None else {"weight": float(weight)}))
    return copy


def _parse(text: str) -> nx.Graph:
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
    graph, clash = nx.DiGraph() if arrows == {">"} else nx.Graph(), False
    try:
        for i, _, j, weight in (word.groups() for word in words if word):
            given = {"weight": float(weight)} if weight else {}
            clash |= graph.get_edge_data(int(i), int(j), given) != given
            graph.add_edge(int(i), int(j), **given)
    except ValueError:
        raise ConfigurationError(f"a weight must be a number, got {text[:80]!r}; write it like 0-1:0.25") from None
    if clash:
        raise ConfigurationError(
            f"an edge may have only one weight, got two weights for one edge in {text[:80]!r}; leave one out"
        )
    return _numbered(graph)


def _load(path: Path) -> nx.Graph:
    """Return the graph of a file.

    Raises:
        ConfigurationError: the file cannot be read as a graph.
    """
    try:
        if path.suffix == ".graphml":
            return _numbered(nx.read_graphml(path))
        text = path.read_text("utf-8")
        return (
            _numbered(nx.node_link_graph(json.loads(text), edges="edges")) if path.suffix == ".json" else _parse(text)
        )
    except (OSError, nx.NetworkXException, *_OF_READERS) as error:
        raise ConfigurationError(f"cannot read a graph from {path}: {error}; write the file with networkx") from error


def _equal_parts(graph: nx.DiGraph) -> npt.NDArray[np.float64]:
    """W[j, i] = 1 / (1 + out-degree of i) for the out-neighbors j of i and for j = i: column-stochastic."""
    edges = nx.to_numpy_array(graph, nodelist=range(len(graph)), weight=None)
    heard: npt.NDArray[np.float64] = edges.T + np.eye(len(graph))
    parts: npt.NDArray[np.float64] = heard / heard.sum(axis=0)
    return parts
