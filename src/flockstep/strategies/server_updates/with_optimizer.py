"""Server update whose steps are taken by a separate optimizer, in place of the job's optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import CompositionError
from flockstep.expression import SHOWN
from flockstep.nodes import Server
from flockstep.optimizers.adagrad import Adagrad
from flockstep.optimizers.base import Optimizer, OptimizerState
from flockstep.strategies.aggregations.base import Combine
from flockstep.strategies.aggregations.mean import mean_of
from flockstep.strategies.consistency import Push
from flockstep.strategies.server_updates.base import ServerUpdate, equal_weights


@dataclass(frozen=True)
class WithOptimizer(ServerUpdate):
    """One step of `optimizer` along the mean, in place of the job's optimizer (Dean et al. 2012: Downpour with
    Adagrad).

    The learning rate is that of `optimizer`, not of the workers, even in the recorded weights. If a strategy lets
    workers step locally, the workers' steps use the job's optimizer. The optimizer must be elementwise, so that each
    shard keeps the state of its own slice.
    """

    optimizer: Optimizer = field(default_factory=Adagrad, metadata=SHOWN)

    memory = "own"

    def __post_init__(self) -> None:
        if not self.optimizer.elementwise:
            raise CompositionError(
                f"the optimizer of with_optimizer must be elementwise, because servers hold slices of the parameters, "
                f"got {self.optimizer}; use for example adagrad"
            )

    def start(self, me: Server) -> OptimizerState:
        """Return the optimizer's initial state, or its previous state when programs restart."""
        kept: OptimizerState | None = getattr(me.state, "update_state", None)
        return self.optimizer.init(me.params) if kept is None else kept

    def apply(
        self, me: Server, state: OptimizerState, group: Sequence[Push], share: float = 1.0, combine: Combine = mean_of
    ) -> list[float]:
        mean = combine([push.gradient for push in group])
        self.optimizer.step(me.params, mean, state, self.optimizer.lr, share)
        me.version += 1
        return equal_weights(group, share)
