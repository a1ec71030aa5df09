"""SCAFFOLD: control variates on clients and server remove the drift of local steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flockstep.arrays.namespace import joined
from flockstep.arrays.schema import FlatArray
from flockstep.nodes import Server, Worker
from flockstep.strategies.drifts.base import ClientChange, Drift, weighted


@dataclass
class ControlState:
    """The control variates of a client (K,), None before its first round: its own, the server's, and the own one after
    the round in hand, which counts once the server has used its change.
    """

    own: FlatArray | None = None
    common: FlatArray | None = None
    next: FlatArray | None = None
    round: int = 0


@dataclass(frozen=True)
class Scaffold(Drift):
    """SCAFFOLD (Karimireddy et al. 2020, algorithm 1, option II): local steps along g - c_i + c.

    c_i estimates a client's gradient, c the mean of all. After tau steps from x to y at rate lr, c_i ← c_i - c + (x -
    y) / (tau lr), and with S of n clients c ← c + |S|/n mean of the changes of c_i. Model and c travel to the clients,
    the changes of both back: twice the bytes of FedAvg. Clients keep 2 more arrays, once they have taken part.
    """

    by_round: ClassVar[bool] = True
    models: ClassVar[int] = 2

    def client_state(self, me: Worker) -> ControlState:
        return ControlState()

    def server_state(self, me: Server) -> FlatArray:
        return 0 * me.params

    def sent(self, model: FlatArray, state: FlatArray) -> FlatArray:
        return joined(model, state)

    def received(self, array: FlatArray, size: int, counted: int, state: ControlState) -> FlatArray:
        if state.round == counted and state.next is not None:
            state.own = state.next
        state.common = array[size:]
        state.own = 0 * state.common if state.own is None else state.own
        return array[:size]

    def corrected(self, gradient: FlatArray, params: FlatArray, model: FlatArray, state: ControlState) -> FlatArray:
        return gradient - state.own + state.common

    def change(self, me: Worker, model: FlatArray, steps: int, number: int, state: ControlState) -> FlatArray:
        assert state.own is not None
        moved = me.params - model
        state.round, state.next = number, state.own - state.common - moved / (steps * me.lr)
        return joined(moved, state.next - state.own)

    def combined(
        self, me: Server, changes: Mapping[int, ClientChange], weights: Mapping[int, float], state: FlatArray
    ) -> FlatArray:
        size = len(me.params)
        share = dict.fromkeys(weights, 1 / me.cluster.workers)
        state += weighted({rank: change.array[size:] for rank, change in changes.items()}, share)
        return weighted({rank: change.array[:size] for rank, change in changes.items()}, weights)
