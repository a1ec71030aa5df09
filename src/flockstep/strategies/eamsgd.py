"""Elastic averaging in which each replica has its own Nesterov momentum."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, require
from flockstep.nodes import Worker
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Traits
from flockstep.strategies.elastic_averaging import ElasticAveraging
from flockstep.strategies.resizing import Resizing


@dataclass
class Velocity:
    """A worker's state: its momentum buffer v of shape (K,)."""

    v: FlatArray


@dataclass(frozen=True)
class ElasticMomentum(ElasticAveraging):
    """EAMSGD: elastic averaging with momentum (Zhang, Choromanska & LeCun 2015, algorithm 2).

    A step is v ← delta v, w ← w + v, the gradient g at that point, w ← w - lr g, v ← v - lr g. Exchanges are those of
    `easgd`, between the center and w, never with the look-ahead point. `momentum` (delta) replaces the momentum of the
    job's sgd; the job's weight decay applies, as g + weight_decay w. The paper uses 0.99, with learning rates ten times
    smaller than those of EASGD. Replicas with momentum drift apart faster, hence the shorter default `period`.
    """

    period: int = 4
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.momentum < 1, "momentum", "in [0, 1)", self.momentum, "0.9 is usual, and the paper uses 0.99")

    # The traits of easgd; needs to know the job's optimizer.
    traits = Traits("partial", survives=True, results=("server", "mean", "rank0", "best"), needs_job=True)

    resizing = Resizing(replicas="own", own=("v",))

    def worker_state(self, me: Worker) -> Velocity:
        """Return the worker's initial momentum buffer: zeros of shape (K,).

        Raises:
            CompositionError: the job's optimizer is not sgd, or has dampening.
        """
        if not isinstance(me.optimizer, SGD) or me.optimizer.dampening:
            raise CompositionError(
                f"eamsgd has its own momentum and needs sgd without momentum and dampening, got {me.optimizer}; use "
                "for example sgd(lr=0.01), or easgd with your optimizer"
            )
        return Velocity(namespace(me.params).zeros_like(me.params))

    async def step(self, me: Worker) -> None:
        """Take one step with Nesterov momentum."""
        state: Velocity = me.state
        assert isinstance(me.optimizer, SGD)
        state.v *= self.momentum
        me.params += state.v
        gradient = await me.gradient()
        if me.optimizer.weight_decay:
            gradient = me.params * me.optimizer.weight_decay + gradient
        change = me.lr * gradient
        me.params -= change
        state.v -= change
