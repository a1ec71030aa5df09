"""Neighbour all-reduce: the weighted mean with those that a graph joins a worker to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flockstep.arrays.kernels import name_of, numpy_dtype
from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.group import Group
from flockstep.errors import ConfigurationError
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import hearing, mixing


async def neighbour_average(
    me: Group, array: FlatArray, weights: npt.ArrayLike | Sequence[Sequence[float]] | Topology, turn: int = 0
) -> None:
    """Replace `array` on worker i by Σ_j W_ij · (worker j's array), summed in order of rank.

    W (n, n) is given, or that of a topology at its `turn`-th step; W_ij ≠ 0 makes j send i one message. With rows that
    sum to one it is a weighted mean; if the columns do too, the mean over all workers stays (Lian et al. 2017). Workers
    end with different arrays. The same sum as that of the strategy dpsgd.

    Raises:
        ConfigurationError: W is not (n, n).
        PeerLost: a neighbour died.
        ProtocolError: one of its messages got lost.
    """
    if isinstance(weights, Topology):
        schedule = mixing(weights, me.workers)
        matrix = schedule[turn % len(schedule)]
    else:
        matrix = np.asarray(weights, np.float64)
    if matrix.shape != (me.workers, me.workers):
        raise ConfigurationError(
            f"weights must be ({me.workers}, {me.workers}) for {me.workers} workers, got {matrix.shape}; "
            "a topology gives them"
        )
    me.send_all(hearing(matrix, me.rank), "neighbour", array)
    mixed = namespace(array).full_like(array, -0.0)  # adding to it keeps every bit; 0 + (-0) would be 0
    shares = matrix[me.rank].astype(numpy_dtype(name_of(array)))
    for j in map(int, np.flatnonzero(matrix[me.rank])):
        mixed += float(shares[j]) * (array if j == me.rank else await me.receive_array("neighbour", j))
    array[:] = mixed
