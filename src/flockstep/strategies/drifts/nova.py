"""FedNova: changes count by their direction, whatever the number of local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.nodes import Server, Worker
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.drifts.base import ClientChange, Drift, weighted


@dataclass(frozen=True)
class Nova(Drift):
    """FedNova (Wang et al. 2020, section 4): each change is divided by the length of its local steps.

    The model moves by tau_eff sum_i p_i Delta_i / a_i with tau_eff = sum_i p_i a_i. a_i is the number of local steps,
    with momentum rho the sum of the weights with which gradients enter: (tau - rho (1 - rho^tau) / (1 - rho)) / (1 -
    rho). Without it, clients that take more steps, because they have more samples or are faster, would draw the model
    to their own optimum. Needs sgd.
    """

    by_round: ClassVar[bool] = True

    def client_state(self, me: Worker) -> None:
        if not isinstance(me.optimizer, SGD):
            raise ConfigurationError(f"nova counts the steps of sgd, got {me.optimizer}; use sgd, or another drift")

    def length(self, me: Worker, steps: int) -> float:
        assert isinstance(me.optimizer, SGD)
        rho = me.optimizer.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def combined(
        self, me: Server, changes: Mapping[int, ClientChange], weights: Mapping[int, float], state: Any
    ) -> FlatArray:
        effective = sum(weight * changes[rank].length for rank, weight in weights.items())
        shares = {rank: effective * weight / changes[rank].length for rank, weight in weights.items()}
        return weighted({rank: change.array for rank, change in changes.items()}, shares)
