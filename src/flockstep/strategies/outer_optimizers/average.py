"""Plain averaging: the mean of the replicas is the next model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.strategies.outer_optimizers.base import OuterOptimizer


@dataclass(frozen=True)
class Average(OuterOptimizer):
    """Plain averaging (McDonald, Hall & Mann 2010): the mean of the replicas is the next model. With weighting=samples,
    this is federated averaging, FedAvg (McMahan et al. 2017).
    """

    moves: ClassVar[bool] = False

    def move(self, model: FlatArray, mean: FlatArray, state: Any) -> None:
        model[:] = mean
