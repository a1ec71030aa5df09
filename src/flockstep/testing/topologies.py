"""Checks of every topology, for several numbers of workers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import numpy as np

from flockstep.errors import ConfigurationError
from flockstep.topologies.base import Topology, spectral_gap
from flockstep.topologies.facts import facts
from flockstep.topologies.graph import adjacency, is_connected

SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 16)
TOLERANCE = 1e-9


def check_topology(topology: Topology, sizes: Iterable[int] = SIZES, doubly_stochastic: bool = True) -> None:
    """Run every check of this module for each number of workers in `sizes`.

    A size that the topology refuses with `ConfigurationError` is skipped, but the topology may not refuse all sizes
    above 2. `doubly_stochastic=False` is for a topology whose documented weights have only rows, or only columns, that
    sum to one; D-PSGD then refuses the topology.

    Raises:
        AssertionError: a check fails; the message names the violated rule.
    """
    for n in (0, -1):
        for method in (topology.graph, topology.weights):
            try:
                method(n)
            except ConfigurationError:
                continue
            except Exception as error:
                raise AssertionError(f"{topology} answers {n} workers with {type(error).__name__}: {error}") from error
            raise AssertionError(f"{topology} takes {n} workers")
    sizes = list(sizes)
    checked = [n for n in sizes if exists(topology, n)]
    many = [n for n in sizes if n > 2]
    assert not many or set(many) & set(checked), f"{topology} refuses every number of workers in {many}"
    for n in checked:
        check_graph(topology, n)
        check_weights(topology, n, doubly_stochastic)
        check_repeatable(topology, n)


def exists(topology: Topology, n: int) -> bool:
    """Return whether the topology accepts n workers; it must refuse a number with a `ConfigurationError`."""
    refusal = None
    try:
        topology.graph(n)
    except ConfigurationError as error:
        refusal = str(error)
    assert refusal != "", f"{topology} refuses {n} workers with an empty error message"
    return refusal is None


def check_graph(topology: Topology, n: int) -> None:
    """Check that the graph has nodes 0 to n-1, is connected (strongly, if its edges are directed), and has no edge
    from a node to itself; and that neighbors are the graph's in either direction, in ascending order and mutual.
    """
    graph = topology.graph(n)
    assert set(graph.nodes) == set(range(n)), f"the nodes of {topology} for n={n} are {sorted(graph.nodes)}"
    edges = adjacency(graph)
    assert is_connected(edges), f"{topology} for n={n} is not connected"
    assert not edges.diagonal().any(), f"{topology} for n={n} has edges from a node to itself"
    heard = [topology.neighbors(n, rank) for rank in range(n)]
    for rank, others in enumerate(heard):
        known = np.flatnonzero(edges[rank] | edges[:, rank]).tolist()
        assert others == known, f"{topology} for n={n}: neighbors({n}, {rank}) returns {others} instead of {known}"
        assert all(rank in heard[j] for j in others), (
            f"{topology} for n={n}: worker {rank} receives from a worker that does not receive from it"
        )


def check_weights(topology: Topology, n: int, doubly: bool) -> None:
    """Check each mixing matrix W: n × n, float64, nonnegative, zero off the edges, rows that sum to one, and a positive
    spectral gap over one period, so that repeated mixing makes the replicas agree.

    If `doubly` is set, W must be symmetric where edges are undirected, and columns must sum to one, so that mixing
    keeps the mean; otherwise columns may sum to one instead of rows. The weights of a topology that changes are the
    mean over its period.
    """
    edges, schedule, one_way = adjacency(topology.graph(n)), topology.schedule(n), facts(topology, n).directed
    of_each, of_w = f"each W in schedule({n}) of {topology} must", f"of W of {topology} for n={n}"
    for weights in schedule:
        assert weights.shape == (n, n), f"{of_each} have shape ({n}, {n}), got {weights.shape}"
        assert weights.dtype == np.float64, f"{of_each} be float64, got {weights.dtype}"
        assert weights.min() >= 0, f"{of_each} have weights >= 0, got {weights.min()}"
        rows, columns = (weights.sum(axis) - 1 for axis in (1, 0))
        off = [rows] if doubly else [rows, columns]
        assert min(np.abs(sums).max() for sums in off) <= TOLERANCE, (
            f"rows {of_w} must sum to one, and are off by {rows}"
        )
        strangers = [(i, j) for i, j in np.argwhere(weights > 0).tolist() if i != j and not edges[j, i]]
        assert not strangers, (
            f"W of {topology} for n={n} has weights between workers without a common edge: {strangers}"
        )
        if doubly:
            symmetric = np.abs(weights - weights.T).max() <= TOLERANCE
            assert symmetric or one_way, f"W of {topology} for n={n} is not symmetric"
            assert np.abs(columns).max() <= TOLERANCE, f"columns {of_w} must sum to one, and are off by {columns}"
    assert np.allclose(topology.weights(n), np.mean(schedule, axis=0)), (
        f"the weights of {topology} for n={n} must be the mean of W over one period"
    )
    gap = spectral_gap(reduce(lambda product, weights: weights @ product, schedule))
    assert gap > TOLERANCE, f"{topology} for n={n} never brings its replicas together: the spectral gap is {gap}"


def check_repeatable(topology: Topology, n: int) -> None:
    """Check that repeated calls return equal results, whatever a caller does to the earlier ones."""
    first, edges = topology.weights(n), list(topology.graph(n).edges)
    kept = first.copy()
    if first.flags.writeable:
        first += 1
    if hasattr(graph := topology.graph(n), "add_node"):  # a graph of networkx can be changed
        graph.add_node("visitor")
    assert np.array_equal(topology.weights(n), kept), f"two calls give a different W of {topology} for n={n}"
    again = topology.graph(n)
    same = list(again.edges) == edges and set(again.nodes) == set(range(n))
    assert same, f"two calls give a different graph of {topology} for n={n}"
