"""Torus: a grid whose edges wrap around."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.errors import ConfigurationError
from flockstep.topologies.base import Topology, require_workers
from flockstep.topologies.graph import Graph, graph_of


@dataclass(frozen=True)
class TorusGraph(Topology):
    """A two-dimensional torus, as close to square as n allows; each worker has four neighbors, or fewer if a side is 2
    or 1.

    Worker r * columns + c is in row r and column c.
    """

    def graph(self, n: int) -> Graph:
        """Return the grid in which every worker has an edge to its right and to its lower neighbor; edges wrap around
        the sides.

        Raises:
            ConfigurationError: n is a prime above 3, for which the grid would have only one row.
        """
        rows, columns = sides(n)
        edges = []
        for i in range(n):
            row, column = divmod(i, columns)
            right, down = row * columns + (column + 1) % columns, (row + 1) % rows * columns + column
            edges += [(i, j) for j in (right, down) if j != i]
        return graph_of(n, edges)


def sides(n: int) -> tuple[int, int]:
    """Return the numbers of rows and columns, rows ≤ columns, of the torus of n workers.

    Raises:
        ConfigurationError: n < 1, or n is a prime above 3.
    """
    require_workers(n)
    rows = next(r for r in range(math.isqrt(n), 0, -1) if n % r == 0)
    if rows == 1 and n > 3:
        raise ConfigurationError(
            f"a torus needs a number of workers that is a product of two factors above 1, got {n}; use {n - 1} or "
            f"{n + 1} workers, or ring"
        )
    return rows, n // rows
