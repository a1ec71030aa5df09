"""Push-sum with gradients against plain numpy: exact mass, the sum that it keeps, and the mean that it finds."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flockstep.errors import ConfigurationError
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.strategies import gradient_push
from flockstep.strategies.gradient_push import UNIT, GradientPush, Mass
from flockstep.testing.strategies import GradientSource, Sent, Watched, bowl_job, equal_bits, run_strategy
from flockstep.topologies.base import Topology
from flockstep.topologies.facts import facts

STILL = bowl_job("sgd(lr=0)")
UNEVEN = "graph('0>1 1>2 2>3 3>0 0>2 2>0 0>3')"
"""One-way, with one, two or three hearers a worker: column-stochastic and not row-stochastic."""
GRAPHS = ["one_peer_exponential", "directed_exponential", UNEVEN, "ring", "star", "graph('0-1 1-2 2-3')"]


def oracle(topology, n, steps, tau=0, job=None, start=None):
    """Algorithm 1 of the paper; with tau > 0 overlapped as in the authors' code: one exchange in flight.

    In the authors' code what is in flight is taken in right before the next exchange begins, and between the two tau
    gradients are computed and nothing is sent. The graph moves on by one with every exchange.
    """
    source, schedule = GradientSource(n, job or bowl_job()), Topology.parse(topology).schedule(n)
    rate = source.engine.optimizer.lr
    x = np.stack([source.start() for _ in range(n)]).astype(np.float64) if start is None else start.copy()
    omega, flying, exchanges = np.ones(n), (np.zeros_like(x), np.zeros(n)), 0
    for step in range(1, steps + 1):
        z = x / omega[:, None]
        x -= rate * np.stack([source.gradient(rank, z[rank]) for rank in range(n)])
        if tau and step % tau:
            continue
        x, omega = x + flying[0], omega + flying[1]
        p = schedule[exchanges % len(schedule)]
        kept, sent = np.diag(np.diag(p)), p - np.diag(np.diag(p))
        flying, exchanges = (sent @ x, sent @ omega), exchanges + 1
        x, omega = kept @ x, kept @ omega
        if not tau:
            x, omega, flying = x + flying[0], omega + flying[1], (np.zeros_like(x), np.zeros(n))
    return x + flying[0], omega + flying[1]


@pytest.mark.oracle("strategy:sgp")
@pytest.mark.parametrize("topology", GRAPHS)
@pytest.mark.parametrize("tau", [0, 1, 3])
def test_equals_the_oracle(topology, tau):
    run = run_strategy(GradientPush(Topology.parse(topology), tau), 4, 14, job=bowl_job())
    x, omega = oracle(topology, 4, 14, tau)
    masses = np.array([run.nodes[rank].state.mass for rank in range(4)]) / UNIT
    assert np.abs(masses - omega).max() < 1e-12
    assert np.abs(np.stack([run.nodes[rank].state.x for rank in range(4)]) - x).max() < 1e-12
    assert np.abs(run.replicas - x / omega[:, None]).max() < 1e-11
    assert np.ptp(omega) > 0.1 or topology != UNEVEN


class AtTheNumerator(GradientPush):
    """Negative control: takes gradients at x instead of at z = x / omega."""

    async def worker(self, me):
        schedule, state = gradient_push.mixing(self.topology, me.workers), me.state
        while me.training:
            me.params[:] = state.x
            me.optimizer_step(await me.gradient())
            state.x[:] = me.params
            await gradient_push.take(me, state, schedule, gradient_push.push(me, state, schedule))


@pytest.mark.negative_control("strategy:sgp")
def test_the_oracle_notices_gradients_at_the_numerator():
    run = run_strategy(AtTheNumerator(Topology.parse(UNEVEN)), 4, 14, job=bowl_job())
    x, omega = oracle(UNEVEN, 4, 14)
    assert np.abs(run.replicas - x / omega[:, None]).max() > 0.01


@pytest.mark.parametrize("compute", ["constant(0)", "pareto(0.1, 1.1)", "speeds(exponential(0.1), (1, 9))"])
@pytest.mark.parametrize("network", ["ideal", "link(1000, 0.5)", "two_tier(2, 1e4, 0, 100, 1)"])
@pytest.mark.parametrize("tau", [0, 2])
def test_time_changes_no_bit(compute, network, tau):
    runs = [
        run_strategy(f"sgp(tau={tau})", 5, 12, compute=compute, network=network),
        run_strategy(f"sgp(tau={tau})", 5, 12),
    ]
    assert equal_bits(*(run.replicas for run in runs))


class Weighed(Watched):
    """Adds up omega and x, what is in flight included, whenever something is sent or taken in."""

    def __init__(self, *args):
        super().__init__(*args)
        self.flying = defaultdict(deque)
        self.totals = []
        self.sums = []

    def weigh(self):
        pushed = [message for queue in self.flying.values() for message in queue]
        held = [runner.node.state for runner in self.runners.values()]
        self.totals.append(sum(s.mass for s in held) + sum(m.note.mass for m in pushed))
        self.sums.append(sum(s.x for s in held) + sum(m.payload for m in pushed))

    def send(self, to, message):
        if message.tag == "push":
            self.flying[message.source, to].append(message)
        super().send(to, message)

    def note(self, event):
        super().note(event)
        if isinstance(event, UpdateEvent):
            self.flying[event.source, event.node].popleft()
            self.weigh()


@given(
    topology=st.sampled_from(GRAPHS),
    tau=st.integers(0, 3),
    seed=st.integers(0, 10**6),
    compute=st.sampled_from(["constant(0.1)", "exponential(0.05)", "pareto(0.05, 1.1)"]),
    network=st.sampled_from(["ideal", "1gbit", "link(500, 0.3)"]),
)
@settings(max_examples=40)
def test_the_mass_is_exact_at_every_moment(topology, tau, seed, compute, network):
    strategy = GradientPush(Topology.parse(topology), tau)
    run = run_strategy(strategy, 4, 10, seed=seed, compute=compute, network=network, simulation=Weighed)
    assert set(run.simulation.totals) == {4 * UNIT}
    assert sum(run.nodes[rank].state.mass for rank in range(4)) == 4 * UNIT


@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
def test_one_peer_exponential_averages_exactly_in_log_n_steps(rounds):
    n = 2**rounds
    start = np.random.default_rng(0).integers(-8, 8, (n, 8)) * 1.0
    exact = run_strategy("sgp", n, rounds, job=STILL, replicas=start)
    assert (exact.replicas == start.mean(0)).all()
    before = run_strategy("sgp", n, rounds - 1, job=STILL, replicas=start) if rounds > 1 else None
    assert before is None or not (before.replicas == start.mean(0)).all()


class Inflates(GradientPush):
    """Negative control: hands over more mass than it parts with."""

    async def worker(self, me):
        send_all = me.send_all

        def cheat(to, tag, array=None, note=None):
            send_all(to, tag, array, Mass(note.mass + 1) if note else None)

        me.send_all = cheat
        await super().worker(me)


@pytest.mark.negative_control("strategy:sgp")
def test_the_mass_notices_a_cheat():
    run = run_strategy(Inflates(), 4, 20, simulation=Weighed)
    assert max(run.simulation.totals) > 4 * UNIT


def test_rows_are_not_enough():
    class RowsOnly(type(Topology.parse("ring"))):
        def weights(self, n):
            weights = super().weights(n)
            weights[:, 0] *= 2
            return weights / weights.sum(1, keepdims=True)

    assert facts(RowsOnly(), 4).row_stochastic
    with pytest.raises(
        ConfigurationError, match=r"needs a column-stochastic mixing matrix, got row sums off by .*; let "
    ):
        run_strategy(GradientPush(RowsOnly()), 4, 2)


def test_a_worker_that_gives_everything_away_is_refused():
    everything = "graph('0>1:1 1>2:0.5 2>3:0.5 3>0:0.5')"
    with pytest.raises(ConfigurationError, match=r"needs workers that keep part of their own weight, got .* sends all"):
        run_strategy(f"sgp({everything})", 4, 2)


@pytest.mark.parametrize(("tau", "step"), [(0, 1.6), (1, 1.0), (2, 1.0)])
def test_with_tau_messages_travel_while_gradients_are_computed(tau, step):
    run = run_strategy(f"sgp(tau={tau})", 4, 20, compute="constant(1)", network="link(1e12, 0.6)")
    ends = sorted(event.seconds for event in run.of(StepEvent) if event.rank == 0)
    assert np.diff(ends).mean() == pytest.approx(step)


@pytest.mark.parametrize(
    ("topology", "hearers"), [("one_peer_exponential", 1), ("directed_exponential", 3), ("ring", 2)]
)
def test_a_step_sends_one_model_to_each_hearer(topology, hearers):
    run = run_strategy(f"sgp({topology})", 6, 12)
    assert [run.totals[rank].sent_bytes for rank in range(6)] == [12 * hearers * 18 * 4] * 6
    assert [len(run.sent("push", rank)) for rank in range(6)] == [12 * hearers] * 6


@pytest.mark.parametrize("topology", ["one_peer_exponential", UNEVEN])
@pytest.mark.parametrize("tau", [0, 1])
def test_a_lost_message_loses_x_and_omega_together(topology, tau):
    """The others find the mean by mass of what is left."""
    start = np.random.default_rng(0).normal(size=(4, 8))
    strategy = GradientPush(Topology.parse(topology), tau)
    run = run_strategy(strategy, 4, 200, job=STILL, replicas=start, faults=["drops(0, 1, 1)"])
    lost = next(e for e in run.simulation.log if isinstance(e, Sent) and (e.message.source, e.to) == (0, 1)).message
    mass = sum(run.nodes[rank].state.mass for rank in range(4))
    assert mass == 4 * UNIT - lost.note.mass
    left = (start.sum(0) - lost.payload) / (mass / UNIT)
    assert np.abs(run.replicas - left).max() < 1e-12
    assert np.abs(left - start.mean(0)).max() > 1e-3


@pytest.mark.parametrize("topology", ["one_peer_exponential", "directed_exponential", "complete"])
@pytest.mark.parametrize("tau", [0, 2])
def test_the_others_go_on_without_the_dead_and_agree(topology, tau):
    start = np.random.default_rng(0).normal(size=(6, 8))
    strategy = GradientPush(Topology.parse(topology), tau)
    run = run_strategy(strategy, 6, 200, job=STILL, replicas=start, faults=["dies(1, 0.5, noticed=0.2)"])
    living = np.delete(run.replicas, 1, axis=0)
    assert np.ptp(living, axis=0).max() < 1e-12
    assert sum(run.nodes[rank].state.mass for rank in (0, 2, 3, 4, 5)) < 6 * UNIT
