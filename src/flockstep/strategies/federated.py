"""Federated averaging: in each round a server chooses some clients, which train on their own data and send changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from flockstep.arrays.schema import FlatArray
from flockstep.errors import CompositionError, RunError, require
from flockstep.messages import Message, Note, Notes
from flockstep.nodes import Server, Worker
from flockstep.strategies.base import TaxonomyEntry
from flockstep.strategies.client_samplings.base import Clients
from flockstep.strategies.client_training import ClientState, ClientTraining, TaskState
from flockstep.strategies.drifts.base import ClientChange
from flockstep.strategies.privacy.base import Privacy
from flockstep.strategies.privacy.exposed import Exposed

EMPTY_ROUNDS = 3
"""Number of rounds in a row without any change from a client after which the run ends."""


class Deadline(Note, frozen=True):
    """Note of the server's message to itself: the round whose time is over."""

    round: int


@dataclass
class RoundState(TaskState):
    """The server's state: the round in hand, and the changes that have arrived in it."""

    round: int = 0
    open: bool = False
    expired: bool = False
    most: float = math.inf
    """Number of rounds that the privacy rule allows."""
    empty: int = 0
    """Number of rounds in a row that have ended by their deadline without a change."""
    awaited: dict[int, float] = field(default_factory=dict)
    """Client of the round whose change has not arrived → how often it counts."""
    changes: dict[int, ClientChange] = field(default_factory=dict)


@dataclass(frozen=True)
class Federated(ClientTraining):
    """Federated averaging, FedAvg (McMahan et al. 2017, algorithm 1): a server, and clients with data of their own.

    In each round the server sends its model to `participants` of the clients, a share below 1 or a number, which
    `sampling` chooses. Each takes `period` local steps (or `epochs` passes over its samples) with a new optimizer, and
    sends the change of its parameters. The mean of the changes moves the server's model, through `outer_optimizer`.

    `weighting` is the weight of a change in the mean. "samples" is n_k / sum of n_j over the participants j, as in the
    paper; "equal" is 1/m for m participants; "expected" is n_k / (m N / n) for N samples of n clients, with which the
    mean is an unbiased estimate of that over all clients (Li et al. 2020, section 3.2). `drift` corrects the local
    steps where clients' data differ.

    A client that has trained for `seconds` sends what it has. A round ends `deadline` seconds after its beginning with
    the changes that have arrived; later ones are dropped. With `spare` = 0.3, 30% more clients are chosen than needed,
    and the first `participants` changes count (Bonawitz et al. 2019, section 2.2). A client that dies costs its change
    alone. All clients together take the steps that are granted to all. `privacy` bounds what the model tells
    of a client.
    """

    notes: ClassVar[Notes] = {**ClientTraining.notes, "deadline": Deadline}

    weighting: Literal["samples", "equal", "expected"] = "samples"
    privacy: Privacy = field(default_factory=Exposed)
    deadline: float = math.inf
    spare: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.deadline > 0, "deadline", "> 0 seconds", self.deadline, "leave it out for no limit")
        require(0 <= self.spare < math.inf, "spare", ">= 0 and finite", self.spare, "0.3 is 30% more clients")
        if self.sampling.by_size and self.weighting != "equal":
            raise CompositionError(
                f"{self.sampling} chooses clients by their samples, and weighting={self.weighting} would count the "
                "samples twice; use weighting=equal, or sampling=uniform"
            )

        ordinary = self.weighting != "equal" or not self.sampling.varies or self.spare or self.deadline < math.inf
        if self.privacy.bounded and (ordinary or self.drift.by_round):
            raise CompositionError(
                f"{self.privacy} counts on clients that are drawn independently, weigh alike and tell nothing else; "
                "use weighting=equal and sampling=poisson, drift=uncorrected or prox, and no deadline or spare"
            )

    taxonomy_entry = TaxonomyEntry("decentral", "sync", "reduce", "single PS")

    def master_state(self, me: Server) -> RoundState:
        clients = me.cluster.workers
        state = RoundState(self.outer_optimizer.start(me.params, clients), self.drift.server_state(me))
        state.most = self.privacy.rounds(clients, self.wanted(clients))
        return state

    def check(self, workers: int) -> None:
        super().check(workers)
        self.privacy.rounds(workers, self.wanted(workers))

    def change(self, me: Worker, model: FlatArray, state: ClientState) -> FlatArray:
        return self.privacy.limited(super().change(me, model, state))

    async def master(self, me: Server) -> None:
        """Hold one round after the other, until the clients have taken the steps that are granted to them."""
        state: RoundState = me.state
        if state.open:
            self._expect_end(me, state)
        async for message in me.messages():
            self._hear(me, state, message)
            if state.open and self._complete(me, state):
                self._end_round(me, state)
            if not state.open and not state.over and state.met == me.cluster.workers:
                self._begin_round(me, state)

    def _hear(self, me: Server, state: RoundState, message: Message) -> None:
        self.hear(me, state, message)
        note = message.note
        if message.tag == "deadline":
            state.expired = state.expired or note.round == state.round
            return
        count = state.awaited.get(message.source)
        if message.tag == "change" and note.round == state.round and count is not None:
            state.changes[message.source] = ClientChange(message.payload, count, note.steps, note.length)
        if message.tag != "here":
            state.awaited.pop(message.source, None)

    def _complete(self, me: Server, state: RoundState) -> bool:
        enough = self.spare > 0 and len(state.changes) >= self.wanted(me.cluster.workers)
        return enough or state.expired or not state.awaited

    def _begin_round(self, me: Server, state: RoundState) -> None:
        """Send the model to the clients of a new round, or end the run."""
        if state.taken >= state.granted or state.round >= state.most:
            self.end(me, state)
            return
        count = math.ceil(self.wanted(me.cluster.workers) * (1 + self.spare))
        state.awaited = self.sampling.choose(me.random, state.clients, count)
        busy = len(state.clients.busy) == len(state.clients.samples)
        if not state.awaited and (busy or not self.sampling.varies):
            return  # every client is busy with an earlier round
        state.round, state.open, state.expired, state.changes = state.round + 1, True, False, {}
        self.send_tasks(me, state, state.awaited, state.round)
        self._expect_end(me, state)

    def _expect_end(self, me: Server, state: RoundState) -> None:
        seconds = self.deadline if state.awaited else 0.0  # a round of nobody ends at once
        if seconds < math.inf:
            me.alarm(seconds, "deadline", Deadline(state.round))

    def _end_round(self, me: Server, state: RoundState) -> None:
        """Move the model by the mean of the changes that have arrived.

        Raises:
            RunError: no change has arrived in several rounds in a row.
        """
        state.open, state.awaited = False, {}
        if not state.changes and not self.privacy.bounded:
            state.empty += self.deadline < math.inf
            if state.empty == EMPTY_ROUNDS:
                raise RunError(
                    f"no client's change has arrived within deadline={self.deadline:g} seconds in {EMPTY_ROUNDS} "
                    "rounds in a row; raise the deadline, or give clients less to do with period or seconds"
                )
            return
        state.empty = 0
        weights = self.weights({rank: one.count for rank, one in state.changes.items()}, state.clients)
        mean = self.drift.combined(me, state.changes, weights, state.drift) if weights else 0 * me.params
        clients, wanted = me.cluster.workers, self.wanted(me.cluster.workers)
        self.move(me, state, self.privacy.released(me, mean, 1 / wanted))
        if (epsilon := self.privacy.spent(state.round, clients, wanted)) is not None:
            me.record_scalar("epsilon", epsilon)
        for rank, weight in weights.items():
            state.clients.counted[rank] = state.round
            me.record_update(rank, 0, weight=weight)

    def weights(self, counts: Mapping[int, float], clients: Clients) -> dict[int, float]:
        """Return the weight of the change of each participant, of which `counts` says how often it was drawn."""
        shares = {rank: counts[rank] for rank in sorted(counts)}
        if self.weighting != "equal":
            shares = {rank: share * clients.samples[rank] for rank, share in shares.items()}
        total = self.wanted(len(clients.samples)) if self.privacy.bounded else sum(shares.values())
        if self.weighting == "expected":
            total = self.wanted(len(clients.samples)) * clients.total / len(clients.samples)
        return {rank: share / total for rank, share in shares.items()}
