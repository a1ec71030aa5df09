"""GoSGD: sum-weighted gossip between random pairs of workers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import require
from flockstep.messages import Message, Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import FormerWorker, Resizing

COLLECTOR = 0
"""Rank of the worker that collects the sets of receivers from all workers at the end of a run, and tells each worker
which peers may still send messages.
"""
TOTAL_MASS = 1 << 60
"""The mass of all workers together, counted in indivisible units, because integers are conserved exactly and floats are
not.
"""


class GossipedModel(Note, frozen=True):
    """Note sent with a model: the mass sent with the model, and the number of the model among those of its sender."""

    mass: int
    number: int


class Have(Note, frozen=True):
    """Note that acknowledges the arrival of the model of the given number."""

    number: int


class Peers(Note, frozen=True):
    """Note that contains a set of ranks: the workers to which the sender has sent messages, or the workers from which
    messages may come.
    """

    ranks: tuple[int, ...]


@dataclass(eq=False)
class UnacknowledgedModel:
    """A model that was sent to a peer which has not acknowledged it yet."""

    peer: int
    number: int
    mass: int
    model: FlatArray


@dataclass(slots=True)
class GossipState:
    """A worker's state: its mass as an integer (alpha_i · 2^60 in the paper's symbols), and the models that peers have
    not acknowledged.
    """

    mass: int
    sent: int = 0
    """Number of models sent so far, which is the number of the last model sent."""
    unacknowledged: list[UnacknowledgedModel] = field(default_factory=list)
    returned: dict[tuple[int, int], int] = field(default_factory=dict)
    """(peer, number of the model) → mass that this worker took back because the peer died."""
    surplus: int = 0
    """Mass that this worker took back although the mass had arrived at its receiver; the worker must still subtract it
    from its own mass.
    """
    receivers: set[int] = field(default_factory=set)
    """Ranks of the peers to which this worker has sent messages."""


@dataclass(frozen=True)
class Gossip(Strategy):
    """GoSGD (Blot, Picard, Cord & Thome 2016): sum-weighted gossip between random pairs of workers.

    After each step, with probability p, a worker halves its mass alpha_i and sends (w_i, alpha_i) to a random other
    worker, which averages the two models weighted by mass and adds the mass to its own. The masses, including those in
    transit, always sum to one. A dead worker's mass is lost, and so is the mass in a lost message.

    With `acknowledged`, which the paper does not have, a receiver acknowledges each model, and the sender keeps a copy
    until then. The sender averages the copy back in if the receiver dies or acknowledges a later model. Then the only
    lost mass is that of dead workers, and that in the last lost message to each peer. If the report of a death arrives
    before an acknowledgement, the mass counts twice until the acknowledgement arrives and the sender subtracts it.

    At the end a worker notifies only the peers to which it has sent messages. Worker 0 collects these sets from all
    other workers, and tells each worker which peers may still send it messages: this takes about 2 n messages, whereas
    notifying every peer would take n². If worker 0 is lost, each worker that it has not notified asks every peer.
    """

    notes: ClassVar[Notes] = {"model": GossipedModel, "have": Have, "receivers": Peers, "senders": Peers}

    p: float = 0.1
    acknowledged: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.p <= 1, "p", "a probability in [0, 1]", self.p, "0.1 is usual")

    # Random and one-way; workers may die.
    traits = Traits(delivery="partial", survives=True, results=("mean", "rank0", "best"))
    taxonomy_entry = TaxonomyEntry("decentral", "soft-bounded async", "ad hoc", "p2p mesh")

    resizing = Resizing(
        replicas="own",
        also="the replicas are averaged with their masses as weights, and afterwards all workers have equal masses",
    )

    def replica(self, former: FormerWorker) -> tuple[FlatArray, float]:
        return former.params, former.state.mass / TOTAL_MASS

    def expected_sends(self, workers: int, steps: int) -> float:
        return workers * steps * self.p

    def worker_state(self, me: Worker) -> GossipState:
        """Return a state with the worker's share of the mass: 1/n of the units, plus one unit on the first ranks if n
        does not divide the total.
        """
        share, rest = divmod(TOTAL_MASS, me.workers)
        return GossipState(share + (me.rank < rest))

    def mass(self, states: Iterable[GossipState], waiting: Iterable[Message]) -> tuple[int, int]:
        models = sum(message.note.mass for message in waiting if message.tag == "model")
        return sum(state.mass for state in states) + models, TOTAL_MASS

    async def worker(self, me: Worker) -> None:
        """Absorb the models that have arrived, take a step, and with probability p send the model to a random peer."""
        state: GossipState = me.state
        while me.training:
            for message in me.arrived("model"):
                absorb(me, state, message)
                if self.acknowledged:
                    state.receivers.add(message.source)
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
                    state.unacknowledged.append(UnacknowledgedModel(peer, state.sent, half, copied(me.params)))
                state.receivers.add(peer)
                me.send(peer, "model", me.params, GossipedModel(half, state.sent))

    async def finish(self, me: Worker) -> None:
        """Absorb the models still in transit, until all peers that may still send a model have finished."""
        me.background("end", answers(me))
        me.send_all(sorted(me.state.receivers), "end")  # not a goodbye: the others must still learn of a death after it
        if me.rank != COLLECTOR:
            me.send(COLLECTOR, "receivers", note=Peers(tuple(me.state.receivers)))
        ended: set[int] = set()
        late: list[Message] = []
        reports = {me.rank: me.state.receivers}
        senders = None
        while senders is None or senders - ended - me.departed:
            if senders is None and me.rank == COLLECTOR and all(rank in reports for rank in me.peers):
                senders = tell(me, reports)
                continue
            if senders is None and COLLECTOR in me.lost:
                senders = set(me.peers)
                me.send_all(sorted(senders - ended), "ask/end")
                continue
            message = await me.receive()
            if message.tag == "model":
                absorb(me, me.state, message)
            elif message.tag in ("end", "end/end"):
                ended.add(message.source)
            elif message.tag == "have":
                late.append(message)
            elif message.tag == "receivers":
                reports[message.source] = set(message.note.ranks)
            elif message.tag == "senders":
                senders = set(message.note.ranks)
        settle(me, me.state, late)


async def answers(me: Worker) -> None:
    """Answer each peer that asks: this worker sends no more models to the peer. The background task continues after the
    worker's last step.
    """
    while True:
        me.send((await me.receive("ask")).source, "end")


def tell(me: Worker, reports: Mapping[int, Collection[int]]) -> set[int]:
    """Tell every live peer which workers may still send messages to it; return the workers that may send messages to
    this worker.
    """
    senders: dict[int, set[int]] = {rank: set() for rank in range(me.workers)}
    for rank, receivers in reports.items():
        for receiver in receivers:
            senders[receiver].add(rank)
    for peer in me.peers:
        me.send(peer, "senders", note=Peers(tuple(sorted(senders[peer]))))
    return senders[me.rank]


def settle(me: Worker, state: GossipState, acknowledgements: Iterable[Message]) -> None:
    """Discard the copies of models that peers have acknowledged, and take back the mass of models that will never be
    acknowledged.
    """
    arrived = {(message.source, message.note.number) for message in acknowledgements}
    last = {peer: max(number for other, number in arrived if other == peer) for peer, _ in arrived}
    outstanding = [
        model_sent for model_sent in state.unacknowledged if (model_sent.peer, model_sent.number) not in arrived
    ]
    lost = [
        model_sent
        for model_sent in outstanding
        if model_sent.peer in me.lost or model_sent.number < last.get(model_sent.peer, 0)
    ]
    state.unacknowledged = [model_sent for model_sent in outstanding if model_sent not in lost]
    for model_sent in lost:
        add(me, state, model_sent.mass, model_sent.model)
        state.returned[model_sent.peer, model_sent.number] = model_sent.mass
    for key in state.returned.keys() & arrived:  # the report of the death overtook the acknowledgement
        state.surplus += state.returned.pop(key)
    given_up = min(state.surplus, state.mass - 1)
    state.mass -= given_up
    state.surplus -= given_up


def absorb(me: Worker, state: GossipState, message: Message) -> None:
    """Average a received model into this worker's model, weighted by mass, and add the mass sent with the model."""
    if message.note.mass:
        add(me, state, message.note.mass, message.payload)
        me.record_update(message.source, max(0, me.step - message.step))


def add(me: Worker, state: GossipState, mass: int, model: FlatArray) -> None:
    """Average model j into model i, weighted by mass: w_i ← (alpha_i w_i + alpha_j w_j) / (alpha_i + alpha_j); alpha_i
    ← alpha_i + alpha_j.
    """
    total = state.mass + mass
    me.params *= state.mass / total
    me.params += (mass / total) * model
    state.mass = total
