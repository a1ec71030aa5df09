"""Push-sum on directed graphs that may change, beside stochastic gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, PeerLost
from flockstep.expression import searched
from flockstep.messages import Note, Notes
from flockstep.nodes import Worker
from flockstep.strategies.base import Cell, Strategy, Traits
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import Matrix, hearing, mixing
from flockstep.topologies.one_peer_exponential import OnePeerExponentialGraph
from flockstep.topologies.requirements import require_column_stochastic

UNIT = 1 << 48
"""The mass omega = 1, in indivisible units: integers are conserved exactly, floats are not."""


class Mass(Note, frozen=True):
    """Beside a share of x: the same share of omega · 2^48."""

    mass: int


@dataclass
class PushState:
    """What a worker pushes from, between steps."""

    x: FlatArray
    """The numerator, (K,); the model is z = x / omega, in `me.params`."""
    mass: int = UNIT
    """omega · 2^48."""
    sent: int = 0
    """Exchanges that this worker has begun."""
    rounds: int = 0
    """Exchanges whose messages have been taken in: `sent`, or one less while one is in flight."""


@dataclass(frozen=True)
class GradientPush(Strategy):
    """SGP (Assran, Loizou, Ballas & Rabbat 2019, algorithm 1), overlapped for tau > 0 as in the authors' code.

    x_i ← x_i - η g_i(z_i); send (p_ji x_i, p_ji omega_i) to those that hear i; sum what is heard; z_i = x_i / omega_i.
    P is column-stochastic: the sums of x and of omega over the workers, what is in flight included, are conserved, the
    latter exactly. With tau > 0 one exchange is in flight: it begins after every tau-th step, travels during the next
    tau gradients, and is taken in right before the next one begins; nothing is sent in between. So a worker computes
    with the omega = p_ii that it kept (1/2 on the default graph), whatever tau is; its own z moves by η / p_ii a
    gradient until the rest of the mass is back, and then every gradient has moved the mean by η. tau is the authors'
    `synch_freq` + 1; they take in early messages at once, here the delay is fixed and no bit depends on time. Momentum
    is the optimizer's, on x, as in the authors' code. A lost message loses x together with its omega.
    """

    notes: ClassVar[Notes] = {"push": Mass}

    topology: Topology = field(default_factory=OnePeerExponentialGraph)
    tau: int = field(default=0, metadata=searched(0, 4, log=False))

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise ConfigurationError(f"tau must be >= 0 steps, got {self.tau}; use 1 to overlap with one gradient")

    # Updates diffuse over the graph; the mass of a dead worker is lost, and the others go on.
    traits = Traits(completeness=4, survives=True, results=("mean", "rank0", "best"))

    @property
    def cell(self) -> Cell:
        """Replicas push to those that hear them; each waits for those that it hears, tau steps later."""
        return Cell("decentral", "bounded async" if self.tau else "sync", "reduce", "graph")

    def check(self, workers: int) -> None:
        """What is sent must arrive in full, and nobody may send everything."""
        require_column_stochastic(self.topology, workers, f"sgp on {self.topology}")
        if any(not weights.diagonal().all() for weights in mixing(self.topology, workers)):
            raise ConfigurationError(
                f"sgp needs workers that keep part of their mass, got one on {self.topology} that sends all of it; "
                "leave its weights away, or let them sum to less than one"
            )

    def worker_state(self, me: Worker) -> PushState:
        """omega = 1, and the model as it is."""
        return PushState(copied(me.params))

    async def worker(self, me: Worker) -> None:
        """Compute at z; step, push and sum x."""
        schedule, state = mixing(self.topology, me.workers), me.state
        if me.step == 0:
            state.x[:] = me.params  # where replicas start apart, they were moved after the state was made
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
        """Take in what is still in flight; tell those who may wait for a message that was lost."""
        await take(me, me.state, mixing(self.topology, me.workers), me.state.sent)
        me.params[:] = debiased(me.state)
        me.leave(peers=True)


def push(me: Worker, state: PushState, schedule: tuple[Matrix, ...]) -> int:
    """Part with p_ji of x and omega for each j that hears this worker and lives; return the exchange's number."""
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


async def take(me: Worker, state: PushState, schedule: tuple[Matrix, ...], rounds: int) -> None:
    """Add up what was pushed to this worker in the first `rounds` exchanges."""
    while state.rounds < rounds:
        heard = np.flatnonzero(schedule[state.rounds % len(schedule)][me.rank])
        for j in map(int, heard):  # by rank, so that the sum does not depend on who was first
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
    """share / whole of x."""
    part: FlatArray = x * (share / whole)
    return part


def debiased(state: PushState) -> FlatArray:
    """z = x / omega."""
    z: FlatArray = state.x / (state.mass / UNIT)
    return z
