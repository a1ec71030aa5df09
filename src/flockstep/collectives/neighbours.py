"""Neighbor all-reduce: the weighted mean over a worker's neighbors on a graph."""

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

    If W_ij ≠ 0, worker j sends worker i one message. If rows of W sum to one, the result is a weighted mean; if columns
    do too, the mean over all workers does not change (Lian et al. 2017). Workers end with different arrays. The sum is
    the same as in the strategy dpsgd.

    Args:
        me: this worker's member of the group.
        array: this worker's array, of shape (K,), changed in place.
        weights: the mixing matrix W, of shape (n, n), or a topology.
        turn: the step of the topology's schedule to take W from.

    Raises:
        ConfigurationError: W is not of shape (n, n).
        PeerLost: a neighbor died.
        ProtocolError: a neighbor's message was lost.
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
