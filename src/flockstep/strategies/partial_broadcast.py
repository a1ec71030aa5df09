"""Every update to some peers; the rest dropped, or deferred."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from flockstep.arrays.ledger import Ledger, on_grid
from flockstep.errors import ConfigurationError
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits
from flockstep.strategies.broadcast import BroadcastState, absorb_arrived, drain, own_update


@dataclass
class PartialState(BroadcastState):
    """The ledger, and what each peer has not been sent yet: (n, K) sums, and how many updates are in each."""

    owed: npt.NDArray[np.float64]
    counts: list[int]


@dataclass(frozen=True)
class PartialBroadcast(Strategy):
    """Partial communication (FAST, section 3, class 4): each update reaches each peer with probability `share` (q).

    rest = "drop": an update that is not sent is lost to that peer; replicas never agree, and on non-IID data the mean
    model fails. rest = "defer": it is added to what the peer is owed and travels with the next message, so that
    communication is complete after all, with unbounded delay, and Statement 1 holds after the final flush. Deferring
    costs n · K numbers of memory on each worker. share = 1 is `broadcast`, bit for bit.
    """

    share: float = 0.25
    rest: Literal["drop", "defer"] = "defer"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigurationError(f"share must be in (0, 1], got {self.share}; 1 sends every update to everyone")
        if not 0 < self.scale < float("inf"):
            raise ConfigurationError(f"scale must be > 0 and finite, got {self.scale}; 1 sums the workers' updates")

    @property
    def traits(self) -> Traits:
        """Partial where updates are dropped, complete with unbounded delay where they are deferred."""
        return Traits(completeness=4 if self.rest == "drop" else 3, survives=True, results=("mean", "rank0", "best"))

    @property
    def cell(self) -> Cell:
        """Replicas hear part of the updates."""
        return Cell("decentral", "async", "ad hoc", "p2p mesh")

    def worker_state(self, me: Worker) -> PartialState:
        """Nothing is owed to begin with."""
        rows = me.workers if self.rest == "defer" and me.workers > 1 else 0
        ledger = Ledger(me.params) if me.workers > 1 else None
        return PartialState(ledger, np.zeros((rows, len(me.params))), [0] * me.workers)

    async def worker(self, me: Worker) -> None:
        """Absorb what came, step, tell some."""
        state: PartialState = me.state
        while me.training:
            absorb_arrived(me, state)
            update = own_update(me, state, await me.gradient(), self.scale)
            chosen = [peer for peer in me.peers if me.random.random() < self.share]
            if self.rest == "drop":
                me.send_all(chosen, "update", update)
            elif me.peers:
                state.owed[me.peers] += update
                for peer in me.peers:
                    state.counts[peer] += 1
                for peer in chosen:
                    pay(me, state, peer)

    async def finish(self, me: Worker) -> None:
        """Pay every debt, leave, absorb what is still in flight."""
        state: PartialState = me.state
        if self.rest == "defer":
            for peer in me.peers:
                while state.counts[peer] or state.owed[peer].any():
                    pay(me, state, peer)
        me.leave(peers=True)
        await drain(me, state)


def pay(me: Worker, state: PartialState, peer: int) -> None:
    """Send what a peer is owed; what the dtype of the parameters cannot hold of it stays owed."""
    update = on_grid(state.owed[peer].astype(me.params.dtype))
    me.send(peer, "update", update, {"count": state.counts[peer]})
    state.owed[peer] -= update
    state.counts[peer] = 0
