"""Synchronous SGD on a binomial tree of workers, which sums gradients toward its root and distributes parameters from
the root.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flockstep.arrays.namespace import copied
from flockstep.collectives.exchange import children, parent
from flockstep.nodes import Worker
from flockstep.optimizers.base import OptimizerState
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import FormerWorker, Resizing


@dataclass(frozen=True)
class TreeServer(Strategy):
    """Synchronous SGD with a reduction tree (FireCaffe: Iandola et al. 2016, section 4).

    Gradients are summed up a binomial tree: in round k worker r with bit k set sends its sum to worker r - 2^k. Worker
    0, the root, divides by n and steps the only optimizer; the parameters are sent down the same edges. Every worker
    but the root sends one gradient per step. The critical path has ceil(log2 n) messages in each direction; a single
    server would receive n messages.
    """

    # Synchronous: a dead worker stops all workers.
    traits = Traits("synchronous", survives=False, results=("rank0", "mean"), server_optimizer=True, clips="combined")
    taxonomy_entry = TaxonomyEntry("central", "sync", "binomial tree", "single PS")

    resizing = Resizing(also="worker 0 keeps the state of the only optimizer")

    def take_over(self, me: Worker, former: Sequence[FormerWorker]) -> None:
        if me.rank == 0:
            me.state = copy.deepcopy(former[0].state)

    def worker_state(self, me: Worker) -> OptimizerState | None:
        """Return the root's optimizer state; other workers have no state."""
        assert me.optimizer is not None
        return me.optimizer.init(me.params) if me.rank == 0 else None

    async def worker(self, me: Worker) -> None:
        above, below = family(me.rank, me.workers)
        while me.training:
            total = copied(await me.gradient())
            for child in below:
                total += (await me.receive("gradient", child)).payload
            if above is None:
                assert me.optimizer is not None
                assert isinstance(me.state, OptimizerState)
                total /= me.workers
                me.optimizer.step(me.params, total, me.state, me.lr)
            else:
                me.send(above, "gradient", total)
                me.params[:] = (await me.receive("parameters", above)).payload
            me.send_all(reversed(below), "parameters", me.params)  # the largest subtree first
            me.record_round()


def family(rank: int, n: int) -> tuple[int | None, list[int]]:
    """Return a worker's parent (None for the root) and children, nearest first, in the binomial tree on workers 0 to
    n-1.
    """
    return (parent(rank, n) if rank else None), children(rank, n)


def depth(rank: int) -> int:
    """Return the number of edges between a worker and the root: the number of bits set in its rank."""
    return int(np.bitwise_count(np.uint64(rank)))
