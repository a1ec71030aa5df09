"""Heavy-ball momentum of any sign, which replaces the momentum of the job's optimizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from flockstep.arrays.namespace import namespace
from flockstep.errors import CompositionError
from flockstep.nodes import Server
from flockstep.optimizers.base import Optimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.aggregations.base import Combine
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.consistency import Push
from flockstep.strategies.server_updates.base import ServerUpdate, equal_weights, rate_of


class HeavyBall(ServerUpdate):
    """Base class of server updates v ← mu v + g', w ← w - lr v (v ← g' at the first step). A subclass determines mu.
    The job must train with sgd.

    The momentum of the job is not applied, but its weight decay is: g' = share (g + weight_decay w).
    """

    @abstractmethod
    def explicit(self, workers: int, optimizer: SGD) -> float:
        """Return the explicit momentum mu for the given number of workers and the job's optimizer."""

    memory = "velocity"

    def start(self, me: Server) -> None:
        """Return the initial velocity: zero, or the velocity in the optimizer's state when programs restart.

        Raises:
            CompositionError: the job does not train with sgd in its heavy-ball form.
        """
        heavy_ball(me.optimizer)
        me.optimizer_state.slots.setdefault("momentum", namespace(me.params).zeros_like(me.params))

    def apply(
        self, me: Server, state: None, group: Sequence[Push], share: float = 1.0, combine: Combine = mean_of
    ) -> list[float]:
        sgd = heavy_ball(me.optimizer)
        momentum, gradient = self.explicit(me.cluster.workers, sgd), combine([push.gradient for push in group])
        sgd.step_with(momentum, me.params, gradient, me.optimizer_state, rate_of(group), share)
        me.version += 1
        return equal_weights(group, share)


def heavy_ball(optimizer: Optimizer) -> SGD:
    """Return the optimizer if it is sgd with heavy-ball momentum.

    Raises:
        CompositionError: the optimizer is not sgd with heavy-ball momentum.
    """
    if not isinstance(optimizer, SGD) or optimizer.nesterov or optimizer.dampening:
        raise CompositionError(
            f"a server_update that sets the momentum needs sgd without nesterov and dampening, got {optimizer}; use "
            "for example sgd(lr=0.1, momentum=0.9), or server_update=plain"
        )
    return optimizer
