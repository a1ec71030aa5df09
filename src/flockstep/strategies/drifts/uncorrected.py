"""No correction: the mean of the changes, as in FedAvg."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flockstep.arrays.schema import FlatArray
from flockstep.nodes import Server
from flockstep.strategies.drifts.base import ClientChange, Drift, weighted


@dataclass(frozen=True)
class Uncorrected(Drift):
    """No correction (FedAvg: McMahan et al. 2017): the model moves by the mean of the clients' changes.

    Where clients' data differ, the model stops at a bias that grows with the number of local steps and the learning
    rate.
    """

    def combined(
        self, me: Server, changes: Mapping[int, ClientChange], weights: Mapping[int, float], state: Any
    ) -> FlatArray:
        return weighted({rank: change.array for rank, change in changes.items()}, weights)
