"""FedBuff: clients train asynchronously, and the server moves its model whenever some changes have arrived."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.messages import Message
from flockstep.nodes import Server
from flockstep.strategies.client_training import AsynchronousTraining, TaskState


@dataclass
class BufferState(TaskState):
    """The server's state: the changes that have arrived since the last move of the model, and their weights."""

    buffer: list[FlatArray] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class FedBuff(AsynchronousTraining):
    """FedBuff (Nguyen et al. 2022, algorithm 1): asynchronous clients, and a buffer of `buffer` changes (K).

    `participants` clients train at any time (the concurrency): when one has sent its change, another one begins at the
    current model. The model moves by (1/K) sum of (1 + tau)^-`power` Delta over the buffer, through `outer_optimizer`;
    tau is the number of moves since the client's model. No client waits for another one.
    """

    buffer: int = 10
    power: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.buffer >= 1, "buffer", ">= 1 changes", self.buffer, "10 is the paper's")
        require(0 <= self.power < math.inf, "power", ">= 0 and finite", self.power, "0.5 is the paper's")

    def master_state(self, me: Server) -> BufferState:
        return BufferState(self.outer_optimizer.start(me.params, me.cluster.workers), self.drift.server_state(me))

    def use(self, me: Server, state: BufferState, message: Message) -> None:
        """Put a change in the buffer; move the model when the buffer is full."""
        late = me.version - message.note.round
        scale = (1 + late) ** -self.power
        state.buffer.append(message.payload)
        state.scales.append(scale)
        me.record_update(message.source, late, weight=scale)
        if len(state.buffer) == self.buffer:
            parts = [scale / self.buffer * change for scale, change in zip(state.scales, state.buffer, strict=True)]
            state.buffer, state.scales = [], []
            self.move(me, state, sum(parts[1:], parts[0]))
