"""Stochastic gradient push: push-sum averaging on directed, possibly time-varying graphs, combined with SGD."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, PeerLost, require
from flockstep.messages import Message, Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, TaxonomyEntry, Traits
from flockstep.strategies.resizing import FormerWorker, Resizing
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import Matrix, hearing, mixing
from flockstep.topologies.one_peer_exponential import OnePeerExponentialGraph
from flockstep.topologies.requirements import require_column_stochastic

UNIT = 1 << 48
"""The mass omega = 1, counted in indivisible units, because integers are conserved exactly and floats are not."""


class Mass(Note, frozen=True):
    """Note sent with a fraction of the sender's numerator x: the same fraction of the sender's mass omega, times
    2^48.
    """

    mass: int


@dataclass
class PushSumState:
    """A worker's push-sum state between steps."""

    x: FlatArray
    """The numerator x, of shape (K,); the model z = x / omega is in `me.params`."""
    mass: int = UNIT
    """The worker's push-sum weight omega, times 2^48, as an integer."""
    sent: int = 0
    """Number of exchanges that this worker has begun."""
    rounds: int = 0
    """Number of exchanges whose messages this worker has received: equal to `sent`, or less by one while an exchange is
    in transit.
    """


@dataclass(frozen=True)
class GradientPush(Strategy):
    """SGP (Assran, Loizou, Ballas & Rabbat 2019, algorithm 1): push-sum averaging on directed graphs.

    x_i ← x_i - η g_i(z_i); send (p_ji x_i, p_ji omega_i) to the out-neighbors j of i; sum the received pairs; z_i = x_i
    / omega_i. P is column-stochastic: the sums of x and of omega over the workers, including messages in transit, are
    conserved; the sum of omega is conserved exactly.

    With tau > 0 one exchange is in flight. It starts after every tau-th step, travels during the next tau gradients,
    and is received right before the next exchange starts; no other messages are sent in between. So a worker computes
    with the omega = p_ii that it kept (1/2 on the default graph), whatever tau is: its own z moves by η / p_ii per
    gradient until the rest of the mass has arrived, and by then every gradient has moved the mean by η. tau is the
    authors' `synch_freq` + 1; their code receives early messages at once, whereas here the delay is fixed, so that no
    bit depends on timing. The optimizer's momentum applies to x, as in the authors' code. A lost message loses x
    together with its omega.
    """

    notes: ClassVar[Notes] = {"push": Mass}

    topology: Topology = field(default_factory=OnePeerExponentialGraph)
    tau: int = 0

    def __post_init__(self) -> None:
        require(self.tau >= 0, "tau", ">= 0 steps", self.tau, "use 1 to overlap the messages with one gradient")

    # Updates spread along the graph's edges; a dead worker's mass is lost, and the others continue.
    traits = Traits(delivery="partial", survives=True, results=("mean", "rank0", "best"))

    @property
    def taxonomy_entry(self) -> TaxonomyEntry:
        """The taxonomy entry of workers that push to their out-neighbors and wait for their in-neighbors; with tau > 0,
        the messages are up to tau steps old.
        """
        return TaxonomyEntry("decentral", "bounded async" if self.tau else "sync", "reduce", "graph")

    def check(self, workers: int) -> None:
        """Check that the mixing matrix is column-stochastic and that every worker keeps part of its mass.

        Raises:
            ConfigurationError: the mixing matrix of the topology violates one of the conditions.
        """
        require_column_stochastic(self.topology, workers, f"sgp on {self.topology}")
        if any(not weights.diagonal().all() for weights in mixing(self.topology, workers)):
            raise ConfigurationError(
                f"sgp needs workers that keep part of their own weight, got {self.topology}, in which a worker sends "
                "all its weight away; leave out the weights of the topology, or let them sum to less than one"
            )

    resizing = Resizing(
        replicas="own",
        also="the replicas are averaged with their masses as weights, and afterwards each worker has mass 1",
    )

    def replica(self, former: FormerWorker) -> tuple[FlatArray, float]:
        return former.params, former.state.mass / UNIT

    def worker_state(self, me: Worker) -> PushSumState:
        """Return the initial state of push-sum: x = a copy of the initial parameters, with the weight omega = 1."""
        return PushSumState(copied(me.params))

    def mass(self, states: Iterable[PushSumState], waiting: Iterable[Message]) -> tuple[int, int]:
        workers = list(states)
        pushed = sum(message.note.mass for message in waiting if message.tag == "push")
        return sum(state.mass for state in workers) + pushed, len(workers) * UNIT

    async def worker(self, me: Worker) -> None:
        """Compute the gradient at z, apply the step to x, push fractions of x to the out-neighbors, and add the
        received fractions.
        """
        schedule, state = mixing(self.topology, me.workers), me.state
        if me.step == 0:
            state.x[:] = me.params  # replicas with different starting points are moved after this state is created
        while me.training:
            gradient = await me.gradient()
            me.params[:] = state.x
            me.optimizer_step(gradient)
            state.x[:] = me.params
            if me.step % max(1, self.tau) == 0:
                await take(me, state, schedule, state.sent)
                push(me, state, schedule)
                if not self.tau:
                    await take(me, state, schedule, state.sent)
            me.params[:] = debiased(state)

    async def finish(self, me: Worker) -> None:
        """Receive the exchange in flight, then notify the peers that may wait for a lost message."""
        await take(me, me.state, mixing(self.topology, me.workers), me.state.sent)
        me.params[:] = debiased(me.state)
        me.leave(peers=True)


def push(me: Worker, state: PushSumState, schedule: tuple[Matrix, ...]) -> int:
    """Send a fraction p_ji of x and of omega to each live out-neighbor j; return the number of exchanges begun so
    far.
    """
    weights = schedule[state.sent % len(schedule)]
    whole, kept = state.mass, state.mass
    shares: dict[int, list[int]] = {}
    for j in hearing(weights, me.rank):
        if j not in me.lost:
            numerator, denominator = float(weights[j, me.rank]).as_integer_ratio()
            share = whole * numerator // denominator
            shares.setdefault(share, []).append(j)
            kept -= share
    for share, others in shares.items():
        me.send_all(others, "push", fraction(state.x, share, whole), Mass(share))
    state.x[:] = fraction(state.x, kept, whole)
    state.mass = kept
    state.sent += 1
    return state.sent


async def take(me: Worker, state: PushSumState, schedule: tuple[Matrix, ...], rounds: int) -> None:
    """Add the fractions of x and omega that were pushed to this worker in the first `rounds` exchanges, and wait for
    those that have not arrived.
    """
    while state.rounds < rounds:
        heard = np.flatnonzero(schedule[state.rounds % len(schedule)][me.rank])
        for j in map(int, heard):  # by rank, so that the sum does not depend on the order of arrival
            if j == me.rank:
                continue
            try:
                message = await me.receive("push", j)
            except PeerLost:
                continue  # its x and its omega are lost together
            state.x += message.payload
            state.mass += message.note.mass
            me.record_update(j, max(0, me.step - message.step))
        state.rounds += 1


def fraction(x: FlatArray, share: int, whole: int) -> FlatArray:
    """Return the array x times share / whole, where `share` and `whole` are integers."""
    part: FlatArray = x * (share / whole)
    return part


def debiased(state: PushSumState) -> FlatArray:
    """Return the worker's de-biased parameters z = x / omega: the pushed sum x over its weight omega."""
    z: FlatArray = state.x / (state.mass / UNIT)
    return z
