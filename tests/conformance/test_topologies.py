"""Every registered topology passes the shipped check; wrong ones do not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import networkx as nx
import numpy as np
import pytest

from flockstep import registry
from flockstep.errors import ConfigurationError
from flockstep.testing.expressions import check_component
from flockstep.testing.topologies import check_topology
from flockstep.topologies.base import Topology
from flockstep.topologies.graph import adjacency
from flockstep.topologies.one_peer_exponential import OnePeerExponentialGraph
from flockstep.topologies.random_regular import drawn_by_pairing
from flockstep.topologies.requirements import require_doubly_stochastic
from flockstep.topologies.ring import RingGraph
from flockstep.topologies.star import StarGraph
from flockstep.topologies.torus import TorusGraph, sides


@pytest.mark.parametrize("name", registry.names("topology"))
def test_conforms(name):
    topology = registry.load("topology", name)()
    check_topology(topology)
    if name != "graph":  # has as many nodes as it has
        check_topology(topology, sizes=[32, 64])
    check_component(topology)


class Wrong(RingGraph):
    def weights(self, n):
        return self.spoil(super().weights(n))

    def spoil(self, weights):
        return weights


class RowsMissOne(Wrong):
    def spoil(self, weights):
        return weights * 0.99


class ColumnsMissOne(Wrong):
    def spoil(self, weights):
        first = np.zeros_like(weights)
        first[0, 0] = 0.1
        first[0, -1] -= 0.1
        return weights + first


class Negative(Wrong):
    def spoil(self, weights):
        return 3 * weights - 2 * np.eye(len(weights))


class OffTheEdges(Wrong):
    def spoil(self, weights):
        return np.full_like(weights, 1 / len(weights))


class NeverMixes(Wrong):
    def spoil(self, weights):
        return np.eye(len(weights))


class Single(Wrong):
    def spoil(self, weights):
        return weights.astype(np.float32)


class Shared(RingGraph):
    answers = {}  # noqa: RUF012  the mistake itself: what it hands out is what it keeps

    def weights(self, n):
        if n not in self.answers:
            self.answers[n] = super().weights(n)
        return self.answers[n]


@dataclass(frozen=True)
class Apart(Topology):
    def graph(self, n):
        if n < 1:
            raise ConfigurationError("none")
        return nx.empty_graph(n)


class Directed(RingGraph):
    def graph(self, n):
        return nx.DiGraph(super().graph(n).edges)


class BadStep(OnePeerExponentialGraph):
    def schedule(self, n):
        first, *others = super().schedule(n)
        first = first.copy()
        first[0], first[1] = np.eye(n)[0], np.eye(n)[0] / 2 + np.eye(n)[1] / 2
        return (first, *others)

    def weights(self, n):
        return np.mean(self.schedule(n), axis=0)


class NotItsMean(OnePeerExponentialGraph):
    def weights(self, n):
        return np.full((n, n), 1 / n) if n > 0 else super().weights(n)


class FromOne(RingGraph):
    def graph(self, n):
        return nx.relabel_nodes(nx.cycle_graph(n) if n > 0 else super().graph(n), {i: i + 1 for i in range(n)})


class Looped(RingGraph):
    def graph(self, n):
        graph = super().graph(n)
        return replace(graph, edges=(*graph.edges, (0, 0)))


class OneWay(RingGraph):
    def neighbors(self, n, rank):
        return [j for j in super().neighbors(n, rank) if j > rank]


class TakesNobody(RingGraph):
    def graph(self, n):
        return super().graph(max(n, 1))


class CrashesOnNobody(RingGraph):
    def graph(self, n):
        return nx.cycle_graph(n) if 1 / n else None


class RefusesAll(RingGraph):
    def graph(self, n):
        raise ConfigurationError("not today")


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        (RowsMissOne, "rows of W"),
        (ColumnsMissOne, "not symmetric"),
        (Negative, "must have weights >= 0"),
        (OffTheEdges, "without a common edge"),
        (NeverMixes, "never brings"),
        (Single, "float32"),
        (Shared, "two calls give a different"),
        (Apart, "not connected"),
        (Directed, "not connected"),
        (BadStep, "columns of W"),
        (NotItsMean, "must be the mean of W over one period"),
        (FromOne, "nodes of"),
        (Looped, "edges from a node to itself"),
        (OneWay, "worker 0 receives from a worker that does not"),
        (TakesNobody, "takes 0 workers"),
        (CrashesOnNobody, "ZeroDivisionError"),
        (RefusesAll, "refuses every number"),
    ],
)
def test_wrong_topology_is_caught(wrong, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_topology(wrong(), sizes=[4, 5])


def test_other_weights_pass_where_they_are_declared():
    class Uniform(StarGraph):
        """Each row gives equal weight to everyone heard: row-stochastic only."""

        def weights(self, n):
            closed = adjacency(self.graph(n)) + np.eye(n)
            return closed / closed.sum(axis=1, keepdims=True)

    check_topology(Uniform(), sizes=[4, 5], doubly_stochastic=False)
    with pytest.raises(AssertionError, match="not symmetric"):
        check_topology(Uniform(), sizes=[4, 5])
    with pytest.raises(ConfigurationError, match=r"column sums off by .*; use a topology"):
        require_doubly_stochastic(Uniform(), 4, "D-PSGD")
    require_doubly_stochastic(StarGraph(), 4, "D-PSGD")


def test_small_rings():
    assert RingGraph().weights(1).tolist() == [[1.0]]
    assert RingGraph().weights(2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert RingGraph().neighbors(1, 0) == []
    assert RingGraph().neighbors(2, 1) == [0]
    assert RingGraph().neighbors(5, 0) == [1, 4]


@pytest.mark.parametrize(
    ("n", "expected"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (12, (3, 4)), (16, (4, 4)), (64, (8, 8))]
)
def test_torus_is_near_square(n, expected):
    assert sides(n) == expected


@pytest.mark.parametrize("d", [1, 2, 3, 5])
def test_random_regular_graphs_are_those_of_networkx(d):
    """Bits of a run follow from its seed: graphs are the ones that were drawn before flockstep drew its own."""
    for n in range(d + 1, 20):
        for seed in range(10 if n * d % 2 == 0 else 0):
            drawn = {tuple(sorted(edge)) for edge in nx.random_regular_graph(d, n, seed=seed).edges}
            assert drawn_by_pairing(d, n, Random(seed)) == drawn


@pytest.mark.parametrize("n", [5, 7, 13])
def test_torus_refuses_primes_with_a_way_out(n):
    with pytest.raises(ConfigurationError, match=f"got {n}; use {n - 1} or {n + 1} workers, or ring"):
        TorusGraph().graph(n)
    check_topology(TorusGraph(), sizes=[n - 1, n + 1])
