"""Sum-weighted gossip between random pairs."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import ConfigurationError
from flockstep.messages import Message
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits

TOTAL_MASS = 1 << 60
"""The mass of all workers together, in indivisible units: integers are conserved exactly, floats are not."""


@dataclass
class GossipState:
    """A worker's share of the mass (alpha_i · 2^60 in the paper's symbols)."""

    mass: int


@dataclass(frozen=True)
class Gossip(Strategy):
    """GoSGD (Blot, Picard, Cord & Thome 2016).

    After each step, with probability p, a worker halves its mass alpha_i and sends (w_i, alpha_i) to a random other,
    which averages by mass and adds the mass to its own. The masses, those in flight included, always sum to one.
    A worker that dies takes its mass along.
    """

    p: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ConfigurationError(f"p must be a probability in [0, 1], got {self.p}; 0.1 is usual")

    @property
    def traits(self) -> Traits:
        """Random and one-way; workers may die."""
        return Traits(completeness=4, survives=True, results=("mean", "rank0", "best"))

    @property
    def cell(self) -> Cell:
        """Anyone may send to anyone; nothing bounds how far replicas drift but chance."""
        return Cell("decentral", "soft-bounded async", "ad hoc", "p2p mesh")

    def worker_state(self, me: Worker) -> GossipState:
        """Equal masses; the units that do not divide go to the first ranks."""
        share, rest = divmod(TOTAL_MASS, me.workers)
        return GossipState(share + (me.rank < rest))

    async def worker(self, me: Worker) -> None:
        """Absorb what came, step, perhaps send."""
        state: GossipState = me.state
        while me.training:
            for message in me.arrived("model"):
                absorb(me, state, message)
            me.optimizer_step(await me.gradient())
            peers = me.peers
            if peers and me.random.random() < self.p:
                half = state.mass // 2
                state.mass -= half
                me.send(peers[int(me.random.integers(len(peers)))], "model", me.params, {"mass": half})

    async def finish(self, me: Worker) -> None:
        """Absorb what is still in flight."""
        me.leave(peers=True)
        async for message in me.messages():
            if message.tag == "model":
                absorb(me, me.state, message)


def absorb(me: Worker, state: GossipState, message: Message) -> None:
    """w_i ← (alpha_i w_i + alpha_j w_j) / (alpha_i + alpha_j);  alpha_i ← alpha_i + alpha_j."""
    mass = int(message.note["mass"])
    if mass == 0:
        return
    total = state.mass + mass
    me.params *= state.mass / total
    me.params += (mass / total) * message.payload
    state.mass = total
    me.record_update(message.source, max(0, me.step - message.step))
