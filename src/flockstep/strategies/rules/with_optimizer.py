"""The servers step with an optimiser of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flockstep.errors import CompositionError
from flockstep.expression import SHOWN
from flockstep.nodes import Server
from flockstep.optimizers.adagrad import Adagrad
from flockstep.optimizers.base import Optimizer, OptimizerState
from flockstep.strategies.consistency import Push
from flockstep.strategies.rules.base import Rule, mean_of


@dataclass(frozen=True)
class WithOptimizer(Rule):
    """One step of `optimizer` along the mean, in place of the job's (Dean et al. 2012: Downpour with Adagrad).

    The optimiser's own learning rate counts, not that of the workers; these go on with the job's optimiser where a
    strategy lets them step locally. Optimisers are elementwise, so each shard keeps the state of its own slice.
    """

    optimizer: Optimizer = field(default_factory=Adagrad, metadata=SHOWN)

    def __post_init__(self) -> None:
        if not self.optimizer.elementwise:
            raise CompositionError(
                f"the optimizer of with_optimizer must be elementwise, for servers hold slices of the parameters, got "
                f"{self.optimizer}; use for example adagrad"
            )

    def start(self, me: Server) -> OptimizerState:
        """A fresh state."""
        return self.optimizer.init(me.params)

    def apply(self, me: Server, state: OptimizerState, group: Sequence[Push]) -> None:
        """Average, step."""
        self.optimizer.step(me.params, mean_of([push.gradient for push in group]), state, self.optimizer.lr)
        me.version += 1
