"""signSGD with majority vote: each worker counts the signs of one slice of the gradients and broadcasts the majority,
at one bit per element in each direction.
"""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays import kernels
from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast, first_not_finite, namespace
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Bytes
from flockstep.errors import Diverged, ProtocolError, require
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import Resizing


@dataclass
class MajorityVoteState:
    """A worker's state: the running mean (K,) of its gradients; None without momentum."""

    mean: FlatArray | None


@dataclass(frozen=True)
class MajorityVote(Strategy):
    """signSGD with majority vote (Bernstein et al. 2018, algorithm 3; with momentum 2019, algorithm 1).

    m ← `momentum` m + (1 - momentum) g. Worker i sends the signs of slice j of m_i to worker j, which counts them and
    broadcasts the sign that most workers sent; w ← w - lr sign, with the job's optimizer, which should be plain SGD. A
    value >= 0 counts as +1, and so does a tie. Each worker sends every element's sign once, and the majority of its
    slice n - 1 times: one bit per element in each direction, packed slice by slice into whole bytes. Without momentum m
    is g.
    """

    momentum: float = 0.0

    def __post_init__(self) -> None:
        require(
            0 <= self.momentum < 1, "momentum", "in [0, 1)", self.momentum, "0.9 is usual, and 0 turns momentum off"
        )

    # Synchronous: a dead worker stops all workers.
    traits = Traits(delivery="synchronous", survives=False, results=("rank0", "mean"), approximation="lost")
    taxonomy_entry = TaxonomyEntry("central", "sync", "scatter-reduce", "distributed PS (k = n)")

    resizing = Resizing(own=("mean",))

    def worker_state(self, me: Worker) -> MajorityVoteState:
        return MajorityVoteState(namespace(me.params).zeros_like(me.params) if self.momentum else None)

    async def worker(self, me: Worker) -> None:
        parts = slices(len(me.params), me.workers)
        while me.training:
            mean = self._mean(me, await me.gradient())
            signs = mean >= 0
            for hop in range(1, me.workers):  # each worker begins with a different receiver
                rank = (me.rank + hop) % me.workers
                me.send(rank, "vote", packed(signs[parts[rank]]))
            own = signs[parts[me.rank]]
            ayes = cast(own, "int32")
            for rank in me.peers:
                ayes += unpacked(await me.receive_array("vote", rank), len(own))
            won = 2 * ayes >= me.workers
            me.send_all(me.peers, "outcome", packed(won))
            signs[parts[me.rank]] = won
            for rank in me.peers:
                part = parts[rank]
                signs[part] = unpacked(await me.receive_array("outcome", rank), part.stop - part.start)
            me.record_round()
            me.optimizer_step(2 * cast(signs, name_of(mean)) - 1)

    def _mean(self, me: Worker, gradient: FlatArray) -> FlatArray:
        """Return the vector whose signs the worker sends: the gradient, or its running mean.

        Raises:
            Diverged: an element is infinite or not a number.
        """
        state: MajorityVoteState = me.state
        if state.mean is not None:
            state.mean *= self.momentum
            state.mean += (1 - self.momentum) * gradient
            gradient = state.mean
        where = first_not_finite(gradient)
        if where >= 0:
            raise Diverged(
                f"gradients must be finite for their signs to be counted, got {gradient[where]} at element {where}; "
                "lower the learning rate or clip the gradient"
            )
        return gradient


def packed(signs: FlatArray) -> Bytes:
    """Return the signs packed into bytes, one bit for each sign: 1 for +1 and 0 for -1."""
    data: Bytes = kernels.of(signs).pack(signs, 1)
    return data


def unpacked(data: Bytes, size: int) -> FlatArray:
    """Return the `size` signs that are packed in `data`, True for +1.

    Raises:
        ProtocolError: `data` does not have the number of bytes that `size` signs take.
    """
    if name_of(data) != "uint8" or len(data) != (size + 7) // 8:
        raise ProtocolError(
            f"{size} signs need {(size + 7) // 8} bytes of uint8, got {len(data)} elements of {name_of(data)}"
        )
    signs: FlatArray = kernels.of(data).unpack(data, size, 1) > 0
    return signs
