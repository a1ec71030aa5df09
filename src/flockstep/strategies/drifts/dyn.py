"""FedDyn: a dynamic regularizer, whose minimum on every client is that of the whole loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.nodes import Server, Worker
from flockstep.strategies.drifts.base import ClientChange, Drift, weighted


@dataclass
class DynamicState:
    """A client's estimate of its gradient (K,), None before its first round, and the estimate after the round in hand,
    which counts once the server has used its change.
    """

    own: FlatArray | None = None
    next: FlatArray | None = None
    round: int = 0


@dataclass(frozen=True)
class Dyn(Drift):
    """FedDyn (Acar et al. 2021, algorithm 1): local steps on the loss - <g_i, w> + alpha/2 |w - w_round|².

    After the round, g_i ← g_i - alpha (w_i - w_round), h ← h - alpha/n sum of (w_i - w_round) over the participants,
    and the model is the mean of their w_i minus h / alpha. Clients keep 1 more array, once they have taken part;
    nothing more travels than with FedAvg.
    """

    by_round: ClassVar[bool] = True

    alpha: float = 0.1

    def __post_init__(self) -> None:
        require(0 < self.alpha < math.inf, "alpha", "> 0 and finite", self.alpha, "the paper tries 0.001 to 0.1")

    def client_state(self, me: Worker) -> DynamicState:
        return DynamicState()

    def server_state(self, me: Server) -> FlatArray:
        return 0 * me.params

    def received(self, array: FlatArray, size: int, counted: int, state: DynamicState) -> FlatArray:
        if state.round == counted and state.next is not None:
            state.own = state.next
        state.own = 0 * array if state.own is None else state.own
        return array

    def corrected(self, gradient: FlatArray, params: FlatArray, model: FlatArray, state: DynamicState) -> FlatArray:
        return gradient - state.own + self.alpha * (params - model)

    def change(self, me: Worker, model: FlatArray, steps: int, number: int, state: DynamicState) -> FlatArray:
        assert state.own is not None
        moved = me.params - model
        state.round, state.next = number, state.own - self.alpha * moved
        return moved

    def combined(
        self, me: Server, changes: Mapping[int, ClientChange], weights: Mapping[int, float], state: FlatArray
    ) -> FlatArray:
        arrays = {rank: change.array for rank, change in changes.items()}
        state -= weighted(arrays, dict.fromkeys(weights, self.alpha / me.cluster.workers))
        return weighted(arrays, weights) - state / self.alpha
