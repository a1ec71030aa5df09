"""Sum-weighted gossip between random pairs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError
from flockstep.expression import searched
from flockstep.messages import Message, Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits

TOTAL_MASS = 1 << 60
"""The mass of all workers together, in indivisible units: integers are conserved exactly, floats are not."""


class Model(Note, frozen=True):
    """Beside a model: its mass, and its number among its sender's."""

    mass: int
    number: int


class Have(Note, frozen=True):
    """A model has arrived."""

    number: int


@dataclass(eq=False)
class Loan:
    """What was sent to a peer that has not said yet that it has it."""

    peer: int
    number: int
    mass: int
    model: FlatArray


@dataclass
class GossipState:
    """A worker's share of the mass (alpha_i · 2^60 in the paper's symbols)."""

    mass: int
    sent: int = 0
    """Models sent so far, which numbers them."""
    loans: list[Loan] = field(default_factory=list)
    returned: dict[tuple[int, int], int] = field(default_factory=dict)
    """(peer, number) → mass of what was taken back from the dead."""
    owed: int = 0
    """Mass that was taken back although it had arrived, and is still to be given up."""


@dataclass(frozen=True)
class Gossip(Strategy):
    """GoSGD (Blot, Picard, Cord & Thome 2016).

    After each step, with probability p, a worker halves its mass alpha_i and sends (w_i, alpha_i) to a random other,
    which averages by mass and adds the mass to its own. The masses, those in flight included, always sum to one.
    A worker that dies takes its mass along, and a message that is lost the mass in it.

    With `acknowledged`, which the paper has not, a receiver says that it has a model, and its sender keeps a copy until
    then: it averages a copy back in when the receiver dies, or acknowledges a later one. Only what the dead held is
    lost then, and what was lost last. Where the news of a death is faster than an acknowledgement, mass counts twice
    until that has come, and is given up then.
    """

    notes: ClassVar[Notes] = {"model": Model, "have": Have}

    p: float = field(default=0.1, metadata=searched(0.01, 1.0, whole=False))
    acknowledged: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ConfigurationError(f"p must be a probability in [0, 1], got {self.p}; 0.1 is usual")

    # Random and one-way; workers may die.
    traits = Traits(completeness=4, survives=True, results=("mean", "rank0", "best"))
    cell = Cell("decentral", "soft-bounded async", "ad hoc", "p2p mesh")

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
                if self.acknowledged:
                    me.send(message.source, "have", note=Have(message.note.number))
            if self.acknowledged:
                settle(me, state, me.arrived("have"))
            me.optimizer_step(await me.gradient())
            peers = me.peers
            if peers and me.random.random() < self.p:
                half = state.mass // 2
                state.mass -= half
                peer, state.sent = peers[int(me.random.integers(len(peers)))], state.sent + 1
                if self.acknowledged:
                    state.loans.append(Loan(peer, state.sent, half, copied(me.params)))
                me.send(peer, "model", me.params, Model(half, state.sent))

    async def finish(self, me: Worker) -> None:
        """Absorb what is still in flight."""
        me.leave(peers=True)
        late: list[Message] = []
        async for message in me.messages():
            if message.tag == "model":
                absorb(me, me.state, message)
            elif message.tag == "have":
                late.append(message)
        settle(me, me.state, late)


def settle(me: Worker, state: GossipState, acknowledgements: Iterable[Message]) -> None:
    """Forget what has arrived; take back what never will."""
    arrived = {(message.source, message.note.number) for message in acknowledgements}
    last = {peer: max(number for other, number in arrived if other == peer) for peer, _ in arrived}
    open_loans = [loan for loan in state.loans if (loan.peer, loan.number) not in arrived]
    lost = [loan for loan in open_loans if loan.peer in me.lost or loan.number < last.get(loan.peer, 0)]
    state.loans = [loan for loan in open_loans if loan not in lost]
    for loan in lost:
        add(me, state, loan.mass, loan.model)
        state.returned[loan.peer, loan.number] = loan.mass
    for key in state.returned.keys() & arrived:  # the news of the death was faster: it had arrived after all
        state.owed += state.returned.pop(key)
    given_up = min(state.owed, state.mass - 1)
    state.mass -= given_up
    state.owed -= given_up


def absorb(me: Worker, state: GossipState, message: Message) -> None:
    """Take a peer's model and mass in."""
    if message.note.mass:
        add(me, state, message.note.mass, message.payload)
        me.record_update(message.source, max(0, me.step - message.step))


def add(me: Worker, state: GossipState, mass: int, model: FlatArray) -> None:
    """w_i ← (alpha_i w_i + alpha_j w_j) / (alpha_i + alpha_j);  alpha_i ← alpha_i + alpha_j."""
    total = state.mass + mass
    me.params *= state.mass / total
    me.params += (mass / total) * model
    state.mass = total
