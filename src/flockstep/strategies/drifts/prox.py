"""FedProx: a proximal term keeps local steps near the round's model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.strategies.drifts.uncorrected import Uncorrected


@dataclass(frozen=True)
class Prox(Uncorrected):
    """FedProx (Li et al. 2020, algorithm 2): each local step is one on the loss plus mu/2 |w - w_round|².

    Partial work of slow clients, the paper's other part, is `seconds` of federated. With mu = 0 it is FedAvg, bit for
    bit. A larger mu lowers the bias and slows training.
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.mu < math.inf, "mu", ">= 0 and finite", self.mu, "the paper tries 0.001 to 1")

    def corrected(self, gradient: FlatArray, params: FlatArray, model: FlatArray, state: Any) -> FlatArray:
        return gradient if self.mu == 0 else gradient + self.mu * (params - model)
