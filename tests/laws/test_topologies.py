"""Every topology against matrices written out by hand, what each states of itself, and graphs of one's own."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import networkx as nx
import numpy as np
import pytest

from flockstep import registry
from flockstep.errors import ConfigurationError
from flockstep.testing.topologies import check_topology
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import facts, mixing, stated
from flockstep.topologies.requirements import sides
from flockstep.topologies.weighted import WeightedGraph, from_networkx

N = 8
UNEVEN = "graph('0>1 1>2 2>3 3>0 0>2 2>0 0>3')"


def weights(text, n=N):
    return Topology.parse(text).weights(n)


def circulant(row):
    """The circulant matrix with W[i, i + k mod n] = row[k]."""
    return np.stack([np.roll(row, i) for i in range(len(row))])


def from_edges(n, edges):
    """Metropolis–Hastings weights of an edge list, by their formula."""
    degree = np.bincount(np.array(edges).ravel(), minlength=n)
    made = np.zeros((n, n))
    for i, j in edges:
        made[i, j] = made[j, i] = 1 / (1 + max(degree[i], degree[j]))
    return made + np.diag(1 - made.sum(1))


@pytest.mark.oracle("topology:ring")
def test_ring():
    assert np.allclose(weights("ring"), circulant(np.array([1, 1, 0, 0, 0, 0, 0, 1]) / 3))


@pytest.mark.oracle("topology:complete")
def test_complete():
    assert np.array_equal(weights("complete"), np.full((N, N), 1 / N))


@pytest.mark.oracle("topology:star")
def test_star():
    expected = np.eye(N) * (1 - 1 / N)
    expected[0] = expected[:, 0] = 1 / N
    assert np.allclose(weights("star"), expected)


@pytest.mark.oracle("topology:torus")
def test_torus():
    row, column = circulant(np.array([0, 1, 0, 0, 1])), circulant(np.array([0, 1, 0, 1]))
    expected = (np.eye(20) + np.kron(np.eye(4), row) + np.kron(column, np.eye(5))) / 5
    assert np.allclose(weights("torus", 20), expected)


@pytest.mark.oracle("topology:exponential")
def test_exponential():
    assert np.allclose(weights("exponential"), circulant(np.array([1, 1, 1, 0, 1, 0, 1, 1]) / 6))


@pytest.mark.oracle("topology:directed_exponential")
def test_directed_exponential():
    hears = circulant(np.array([1, 0, 0, 0, 1, 0, 1, 1]) / 4)  # i hears i - 1, i - 2 and i - 4
    assert np.allclose(weights("directed_exponential"), hears)


@pytest.mark.oracle("topology:one_peer_exponential")
@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_one_peer_exponential(n):
    schedule = Topology.parse("one_peer_exponential").schedule(n)
    assert len(schedule) == np.log2(n)
    for k, step in enumerate(schedule):
        row = np.zeros(n)
        row[0] = row[-(2**k) % n] = 0.5
        assert np.array_equal(step, circulant(row))
    assert np.array_equal(np.linalg.multi_dot([np.eye(n), *schedule, np.eye(n)]), np.full((n, n), 1 / n))


@pytest.mark.oracle("topology:random_regular")
@pytest.mark.parametrize(("d", "n"), [(2, 7), (3, 8), (4, 9), (3, 64)])
def test_random_regular(d, n):
    topology = Topology.parse(f"random_regular({d})")
    made = topology.weights(n)
    edges = made * (1 - np.eye(n)) > 0
    assert (edges.sum(0) == d).all()
    assert np.allclose(made, (np.eye(n) + edges) / (1 + d))
    assert np.array_equal(made, topology.weights(n))
    if n > 2 * d:
        assert not np.array_equal(made, weights(f"random_regular({d}, seed=1)", n))


@pytest.mark.oracle("topology:tree")
def test_tree():
    assert np.allclose(weights("tree"), from_edges(N, [(0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6), (3, 7)]))
    assert np.allclose(weights("tree(3)", 6), from_edges(6, [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]))
    assert np.allclose(weights("tree(1)", 4), from_edges(4, [(0, 1), (1, 2), (2, 3)]))


@pytest.mark.oracle("topology:hierarchical")
def test_hierarchical():
    groups = [(0, 1), (0, 2), (1, 2), (3, 4), (5, 6)]
    assert np.allclose(weights("hierarchical(3)", 7), from_edges(7, [*groups, (0, 3), (0, 5), (3, 5)]))


@pytest.mark.oracle("topology:graph")
def test_graph():
    given = "graph('0-1:0.25 1-2:0.5 2-0:0.125')"
    assert np.array_equal(weights(given, 3), np.array([[5, 2, 1], [2, 2, 4], [1, 4, 3]]) / 8)
    assert np.allclose(weights("graph('0-1 1-2 1-3')", 4), from_edges(4, [(0, 1), (1, 2), (1, 3)]))
    # Equal parts of what is sent: 0 to 1, 2, 3 and itself, 1 to 2, 2 to 3 and 0, 3 to 0. Columns sum to one.
    parts = np.array([[3, 0, 4, 6], [3, 6, 0, 0], [3, 6, 4, 0], [3, 0, 4, 6]]) / 12
    assert np.allclose(weights(UNEVEN, 4), parts)
    assert np.allclose(weights("graph('0>1:0.25 1>0:0.5 1>1:0.5')", 2), [[0.75, 0.5], [0.25, 0.5]])


def gap(eigenvalues):
    return 1 - np.sort(np.abs(eigenvalues))[-2]


ANGLES = 2 * np.pi * np.arange(N) / N
TURN = np.exp(1j * ANGLES)
STATED = [
    # topology, workers, symmetric, rows, columns, one-way, bipartite, period, spectral gap
    ("ring", N, True, True, True, False, True, 1, gap((1 + 2 * np.cos(ANGLES)) / 3)),
    ("ring", 7, True, True, True, False, False, 1, 1 - (1 + 2 * np.cos(2 * np.pi / 7)) / 3),
    ("complete", N, True, True, True, False, False, 1, 1),
    ("star", N, True, True, True, False, True, 1, 1 / N),
    ("torus", N, True, True, True, False, True, 1, 1 / 2),
    ("torus", 9, True, True, True, False, False, 1, 1 - (1 + 2 + 2 * np.cos(2 * np.pi / 3)) / 5),
    ("exponential", N, True, True, True, False, False, 1, gap((1 + 2 * TURN + 2 * TURN**2 + TURN**4).real / 6)),
    ("directed_exponential", N, False, True, True, True, False, 1, gap((1 + TURN + TURN**2 + TURN**4) / 4)),
    ("one_peer_exponential", N, False, True, True, True, False, 3, 1),
    ("one_peer_exponential", 2, True, True, True, False, True, 1, 1),
    ("random_regular(2)", N, True, True, True, False, True, 1, gap((1 + 2 * np.cos(ANGLES)) / 3)),
    ("tree", 3, True, True, True, False, True, 1, 1 / 3),
    ("tree", N, True, True, True, False, True, 1, None),
    ("hierarchical", N, True, True, True, False, False, 1, None),
    ("graph", 4, True, True, True, False, True, 1, 2 / 3),
    (UNEVEN, 4, False, False, True, True, False, 1, None),
    ("graph('0-1:0.5 1-0:0.5')", 2, True, True, True, False, True, 1, 1),
    ("graph('0>1:0.25 1>0:0.5')", 2, False, False, True, False, True, 1, 3 / 4),
]


@pytest.mark.parametrize(
    ("text", "n", "symmetric", "rows", "columns", "one_way", "bipartite", "period", "expected"), STATED
)
def test_each_states_what_holds_of_it(text, n, symmetric, rows, columns, one_way, bipartite, period, expected):
    found = facts(Topology.parse(text), n)
    assert found.symmetric == symmetric
    assert found.row_stochastic == rows
    assert found.column_stochastic == columns
    assert found.doubly_stochastic == (rows and columns)
    assert found.directed == one_way
    assert found.bipartite == bipartite
    assert found.period == period
    assert found.connected
    if expected is None:
        product = np.linalg.multi_dot([np.eye(n), *mixing(Topology.parse(text), n), np.eye(n)])
        expected = gap(np.linalg.eigvals(product))
        assert 0 < expected < 1
    assert found.spectral_gap == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "n", "words"),
    [
        ("ring", 8, "symmetric, doubly stochastic, bipartite, spectral gap 0.195"),
        ("one_peer_exponential", 8, "one-way, doubly stochastic, not bipartite, spectral gap 1 over 3 steps"),
        ("graph('0>1:0.25 1>0:0.5')", 2, "not symmetric, column-stochastic, bipartite, spectral gap 0.75"),
    ],
)
def test_what_holds_is_said_in_words(text, n, words):
    assert stated(Topology.parse(text), n) == words


def test_every_topology_states_something():
    assert {Topology.parse(text).__class__ for text, *_ in STATED} == {
        registry.load("topology", name) for name in registry.names("topology")
    }


def test_row_stochastic_only_is_told_apart():
    class Rows(type(Topology.parse("star"))):
        def weights(self, n):
            closed = super().weights(n) > 0
            return closed / closed.sum(1, keepdims=True)

    found = facts(Rows(), 4)
    assert (found.row_stochastic, found.column_stochastic, found.symmetric, found.directed) == (
        True,
        False,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("text", "n", "larger"),
    [("ring", 6, [0, 2, 4]), ("star", 5, [1, 2, 3, 4]), ("tree", 7, [1, 2, 0]), ("ring", 1, [0])],
)
def test_the_larger_side_comes_first(text, n, larger):
    one, other = sides(Topology.parse(text), n, "a test")
    assert len(one) >= len(other)
    assert sorted(one + other) == list(range(n))
    assert text == "tree" or one == larger
    graph = Topology.parse(text).graph(n)
    assert not any((i in one) == (j in one) for i, j in graph.edges)


@dataclass(frozen=True)
class Spoiled(Topology):
    """Negative control: a topology with half of one edge's weight moved to the diagonal, at its first step."""

    base: Topology

    def graph(self, n):
        return self.base.graph(n)

    def schedule(self, n):
        first, *others = self.base.schedule(n)
        first = first.copy()
        j = 1 + int(np.flatnonzero(first[0, 1:])[0])
        first[0, 0], first[0, j] = first[0, 0] + first[0, j] / 2, first[0, j] / 2
        return (first, *others)

    def weights(self, n):
        self.base.weights(n)
        return np.mean(self.schedule(n), axis=0)


@pytest.mark.negative_control(
    "topology:ring",
    "topology:complete",
    "topology:star",
    "topology:torus",
    "topology:exponential",
    "topology:directed_exponential",
    "topology:one_peer_exponential",
    "topology:random_regular",
    "topology:tree",
    "topology:hierarchical",
    "topology:graph",
)
@pytest.mark.parametrize("name", registry.names("topology"))
def test_the_check_notices_a_weight_that_moved(name):
    topology = registry.load("topology", name)()
    check_topology(topology, sizes=[4])
    assert not facts(Spoiled(topology), 4).column_stochastic
    with pytest.raises(AssertionError, match=r"is not symmetric|columns of W"):
        check_topology(Spoiled(topology), sizes=[4])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", [nx.Graph, nx.DiGraph])
def test_networkx_graphs_and_files_give_the_same_weights(tmp_path, weighted, kind):
    graph = kind()
    for i, j, weight in [("a", "b", 0.25), ("b", "c", 0.125), ("c", "a", 0.5)]:
        graph.add_edge(i, j, **({"weight": weight} if weighted else {}))
    (tmp_path / "ring.json").write_text(json.dumps(nx.node_link_data(graph, edges="edges")))
    nx.write_graphml(graph, tmp_path / "ring.graphml")
    (tmp_path / "ring.txt").write_text(from_networkx(graph).edges)
    expected = from_networkx(graph).weights(3)
    assert (expected[1, 0] == 0.25) == weighted
    for name in ("ring.json", "ring.graphml", "ring.txt"):
        assert np.array_equal(WeightedGraph(path=str(tmp_path / name)).weights(3), expected)
    assert facts(from_networkx(graph), 3).directed == graph.is_directed()
    assert facts(from_networkx(graph), 3).column_stochastic


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    for path in ("missing.graphml", "broken.json"):
        with pytest.raises(ConfigurationError, match="cannot read a graph from"):
            WeightedGraph(path=str(tmp_path / path)).weights(3)


def test_a_file_of_networkx_without_networkx_is_refused_with_a_way_out(tmp_path, monkeypatch):
    (tmp_path / "ring.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "networkx", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'flockstep\[graphs\]', or write a list of edges"):
        WeightedGraph(path=str(tmp_path / "ring.json")).weights(3)
