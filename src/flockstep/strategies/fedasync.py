"""FedAsync: the server mixes every client's model into its own as it arrives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.messages import Message
from flockstep.nodes import Server, Worker
from flockstep.strategies.client_training import AsynchronousTraining, ClientState, TaskState


@dataclass(frozen=True)
class FedAsync(AsynchronousTraining):
    """FedAsync (Xie, Koyejo & Gupta 2019, algorithm 1): x ← (1 - alpha_t) x + alpha_t x_new for every client's model.

    alpha_t is `alpha` s(tau), where tau is the number of moves since the client's model: s = (1 + tau)^-`power`
    (polynomial), or with `bound`, 1 up to tau = bound and 1 / (power (tau - bound) + 1) from there on (hinge). The
    paper's regularized local steps are drift=prox. `participants` clients train at any time.
    """

    alpha: float = 0.6
    power: float = 0.5
    bound: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.alpha <= 1, "alpha", "in (0, 1]", self.alpha, "0.6 is usual")
        require(0 <= self.power < math.inf, "power", ">= 0 and finite", self.power, "0.5 is usual")
        require(self.bound is None or self.bound >= 0, "bound", ">= 0 moves", self.bound, "4 is usual")

    def master_state(self, me: Server) -> TaskState:
        return TaskState(self.outer_optimizer.start(me.params, me.cluster.workers), self.drift.server_state(me))

    def change(self, me: Worker, model: FlatArray, state: ClientState) -> FlatArray:
        return me.params

    def use(self, me: Server, state: TaskState, message: Message) -> None:
        """Mix a client's model into the server's."""
        late = me.version - message.note.round
        weight = self.alpha * self.scale(late)
        self.move(me, state, weight * (message.payload - me.params))
        me.record_update(message.source, late, weight=weight)

    def scale(self, late: int) -> float:
        """Return s(tau) for the staleness tau = `late`."""
        if self.bound is None:
            return float((1 + late) ** -self.power)
        return 1.0 if late <= self.bound else 1 / (self.power * (late - self.bound) + 1)
