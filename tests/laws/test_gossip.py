"""Gossip against plain numpy: exact mass, the mean that it keeps, and how often it speaks."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flockstep.records.events import NodeEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.strategies.gossip import TOTAL_MASS, Gossip, GossipedModel
from flockstep.testing.strategies import (
    COMPUTE,
    GradientSource,
    Sent,
    Watched,
    bowl_job,
    equal_bits,
    run_strategy,
    small_job,
)

STILL = bowl_job("sgd(lr=0)")


def mixed(w, mass, other, weight):
    """The average by mass, in the strategy's order of operations."""
    total = mass + weight
    return w * w.dtype.type(mass / total) + w.dtype.type(weight / total) * other


def oracle(n, p, steps, seed=0):
    """GoSGD's loop (receive, step, perhaps send) where messages take no time."""
    source = GradientSource(n, small_job(), seed)
    random = [np.random.default_rng(np.random.SeedSequence((seed, 0x5747, rank + (1 << 31)))) for rank in range(n)]
    w, mass = [source.start() for _ in range(n)], [2**60 // n + (rank < 2**60 % n) for rank in range(n)]
    inbox, durations = defaultdict(list), [ComputeModel.parse(COMPUTE).stream(seed, rank) for rank in range(n)]
    due = [(next(durations[rank]), rank, 1) for rank in range(n)]
    heapq.heapify(due)
    while due:
        t, rank, step = heapq.heappop(due)
        w[rank] -= np.float32(0.1) * source.gradient(rank, w[rank])
        if n > 1 and random[rank].random() < p:
            half = mass[rank] // 2
            mass[rank] -= half
            peer = int(random[rank].choice([r for r in range(n) if r != rank]))
            inbox[peer].append((w[rank].copy(), half))
        if step < steps:
            heapq.heappush(due, (t + next(durations[rank]), rank, step + 1))
        for listener in [rank] if due else range(n):
            for other, weight in inbox.pop(listener, []):
                w[listener] = mixed(w[listener], mass[listener], other, weight)
                mass[listener] += weight
    return w, mass


class Weighed(Watched):
    """Adds up all masses, those in flight included, whenever one is sent or absorbed."""

    def __init__(self, *args):
        super().__init__(*args)
        self.flying = defaultdict(deque)
        self.totals = []

    def weigh(self):
        held = sum(runner.node.state.mass for runner in self.runners.values())
        self.totals.append(held + sum(map(sum, self.flying.values())))

    def send(self, to, message):
        if message.tag == "model" and message.note.mass:
            self.flying[message.source, to].append(message.note.mass)
            self.weigh()
        super().send(to, message)

    def note(self, event):
        super().note(event)
        if isinstance(event, UpdateEvent):
            self.flying[event.source, event.node].popleft()
            self.weigh()


@pytest.mark.oracle("strategy:gossip")
@pytest.mark.parametrize("n", [2, 3, 5])
@pytest.mark.parametrize("p", [0.1, 0.5, 1])
@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_oracle(n, p, seed):
    run = run_strategy(f"gossip({p})", n, 15, seed=seed, network="ideal")
    replicas, masses = oracle(n, p, 15, seed)
    assert [run.nodes[rank].state.mass for rank in range(n)] == masses
    assert all(equal_bits(one, other) for one, other in zip(run.replicas, replicas, strict=True))


@given(
    n=st.integers(2, 7),
    p=st.sampled_from([0.05, 0.3, 1.0]),
    seed=st.integers(0, 10**6),
    compute=st.sampled_from(["constant(0.1)", "exponential(0.05)", "pareto(0.05, 1.1)"]),
    network=st.sampled_from(["ideal", "1gbit", "link(500, 0.3)"]),
)
@settings(max_examples=40)
def test_the_mass_is_exact_at_every_moment(n, p, seed, compute, network):
    run = run_strategy(f"gossip({p})", n, 10, seed=seed, compute=compute, network=network, simulation=Weighed)
    assert set(run.simulation.totals) <= {TOTAL_MASS}
    assert sum(run.nodes[rank].state.mass for rank in range(n)) == TOTAL_MASS
    assert not any(run.simulation.flying.values())


def weighted_mean(run):
    """The mean by mass of the replicas; nothing is in flight at the end."""
    mass = np.array([run.nodes[rank].state.mass for rank in range(len(run.replicas))], np.float64) / TOTAL_MASS
    return mass @ run.replicas


@pytest.mark.parametrize("p", [0.1, 1])
@pytest.mark.parametrize("network", ["ideal", "link(500, 0.3)"])
def test_without_gradients_the_mean_by_mass_stays(p, network):
    for seed in range(5):
        start = np.random.default_rng(seed).normal(size=(5, 8))
        run = run_strategy(f"gossip({p})", 5, 30, job=STILL, seed=seed, network=network, replicas=start)
        assert np.abs(weighted_mean(run) - start.mean(0)).max() < 1e-14
        assert not equal_bits(run.replicas, start)


@pytest.mark.parametrize("p", [0, 0.1, 0.4, 1])
def test_a_worker_sends_one_model_with_probability_p(p):
    n, steps = 5, 200
    run = run_strategy(f"gossip({p})", n, steps)
    count = len(run.sent("model"))
    assert abs(count - p * n * steps) <= 5 * np.sqrt(n * steps * p * (1 - p))
    assert sum(run.totals[rank].sent_bytes for rank in range(n)) == count * 18 * 4
    receivers = {(sent.message.source, sent.to) for sent in run.sent("model")}
    leave_messages = len(receivers) + 2 * (n - 1)
    assert sum(run.totals[rank].messages_sent for rank in range(n)) == count + leave_messages
    assert not any(source == to for source, to in receivers)
    assert len(receivers) == (n * (n - 1) if p else 0)


class KeepsItsMass(Gossip):
    """Negative control: sends half of its mass and keeps all of it."""

    async def worker(self, me):
        send = me.send

        def cheat(to, tag, array=None, note=None):
            if tag == "model":
                me.state.mass += note.mass
            send(to, tag, array, note)

        me.send = cheat
        await super().worker(me)


class EqualWeights(Gossip):
    """Negative control: rows sum to one, columns do not: the receiver averages half and half whatever the mass."""

    async def worker(self, me):
        while me.training:
            for message in me.arrived("model"):
                me.params += (message.array - me.params) / 2
            me.optimizer_step(await me.gradient())
            me.send(int(me.random.choice(me.peers)), "model", me.params, GossipedModel(0, 0))


def test_the_mass_notices_a_cheat():
    run = run_strategy(KeepsItsMass(0.5), 4, 20, simulation=Weighed)
    assert max(run.simulation.totals) > TOTAL_MASS


@pytest.mark.negative_control("strategy:gossip")
@pytest.mark.parametrize("broken", [KeepsItsMass(0.5), EqualWeights(1)], ids=lambda s: type(s).__name__)
def test_the_mean_notices_wrong_weights(broken):
    start = np.random.default_rng(0).normal(size=(5, 8))
    run = run_strategy(broken, 5, 30, job=STILL, replicas=start)
    total = sum(run.nodes[rank].state.mass for rank in range(5)) / TOTAL_MASS
    assert np.abs(weighted_mean(run) / total - start.mean(0)).max() > 0.01


class LosesOne(Weighed):
    """The first model from worker 0 to worker 1 gets lost."""

    def send(self, to, message):
        first = not any(
            isinstance(e, Sent) and (e.message.source, e.to, e.message.tag) == (0, 1, "model") for e in self.log
        )
        if (message.source, to, message.tag) == (0, 1, "model") and first:
            self.note(Sent(self.now, to, message))
        else:
            super().send(to, message)


@pytest.mark.parametrize("acknowledged", [True, False])
def test_who_keeps_copies_gets_the_mass_of_a_lost_message_back(acknowledged):
    start = np.random.default_rng(0).normal(size=(3, 8))
    strategy = f"gossip(0.5, acknowledged={acknowledged})"
    run = run_strategy(strategy, 3, 40, job=STILL, replicas=start, simulation=LosesOne)
    total = sum(run.nodes[rank].state.mass for rank in range(3))
    assert (total == TOTAL_MASS) == acknowledged
    if acknowledged:
        assert np.abs(weighted_mean(run) - start.mean(0)).max() < 1e-12


def test_what_a_dead_worker_never_took_comes_back():
    """Sent to it after it died and before that was noticed."""
    masses = {}
    for acknowledged in (True, False):
        strategy = f"gossip(0.5, acknowledged={acknowledged})"
        run = run_strategy(strategy, 3, 60, faults=["dies(1, 0.5, noticed=1.0)"], simulation=Weighed)
        masses[acknowledged] = sum(run.nodes[rank].state.mass for rank in (0, 2))
        assert not any(loan.peer == 1 for rank in (0, 2) for loan in run.nodes[rank].state.unacknowledged)
    assert masses[False] < masses[True] < TOTAL_MASS


@pytest.mark.parametrize("at", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_an_acknowledgement_that_the_news_of_a_death_overtakes_makes_no_mass(at, seed):
    strategy, faults = "gossip(1, acknowledged=True)", [f"dies(1, {at})"]
    run = run_strategy(strategy, 3, 60, seed=seed, network="link(1e4, 0.3)", faults=faults)
    assert sum(run.nodes[rank].state.mass for rank in (0, 2)) <= TOTAL_MASS


def test_to_end_takes_a_few_messages_per_worker():
    """If every worker notified all others, the end would take n² messages."""
    run = run_strategy("gossip(0.1)", 40, 10)
    models, messages = len(run.sent("model")), sum(run.totals[rank].messages_sent for rank in range(40))
    assert messages <= 2 * models + 2 * 39


@pytest.mark.parametrize("acknowledged", [True, False])
@pytest.mark.parametrize("share", np.linspace(0.9, 1, 8))
def test_the_others_end_where_the_first_worker_dies_near_the_end(acknowledged, share):
    strategy = f"gossip(1, acknowledged={acknowledged})"
    setting = {"network": "link(1e4, 0.3)", "compute": "exponential(0.05)"}
    whole = run_strategy(strategy, 4, 10, **setting)
    run = run_strategy(strategy, 4, 10, faults=[f"dies(0, {share * whole.seconds}, noticed=0.2)"], **setting)
    assert all(run.simulation.runners[rank].done for rank in range(1, 4))
    assert sum(run.nodes[rank].state.mass for rank in range(1, 4)) <= TOTAL_MASS


def test_acknowledging_changes_nothing_where_nothing_is_lost():
    one, other = (run_strategy(f"gossip(0.5, acknowledged={a})", 4, 30) for a in (False, True))
    assert equal_bits(one.replicas, other.replicas)
    assert sum(other.nodes[rank].state.mass for rank in range(4)) == TOTAL_MASS


@pytest.mark.parametrize("seed", range(3))
def test_all_end_where_the_collector_dies_after_it_has_said_that_it_sends_no_more(seed: int) -> None:
    setting = {"compute": "constant(1)", "network": "1gbit", "seed": seed}
    run = run_strategy("gossip(p=0.2)", 8, 12, faults=["slows(7, 3)", "dies(0, at=25)"], **setting)
    assert {event.node for event in run.of(NodeEvent)} == set(range(1, 8))


class DiesTelling(Watched):
    """The worker that collects who was sent models is killed when it has told so many others."""

    told = 0

    def send(self, to, message):
        self.told -= message.tag == "senders"
        if message.tag != "senders" or self.told >= 0:
            super().send(to, message)

    def _ended(self, runner):
        if runner.node.address == 0:
            self._dead.add(0)
            self._queue.schedule(self.now + 5, partial(self.notice, 0))
        else:
            super()._ended(runner)


@pytest.mark.parametrize("acknowledged", [True, False])
@pytest.mark.parametrize("told", range(6))
def test_all_end_where_the_collector_dies_while_it_tells_the_others(told: int, acknowledged: bool) -> None:
    """Those that it has told have ended long before its death is known."""
    dies = type("Dies", (DiesTelling,), {"told": told})
    strategy, setting = f"gossip(1, acknowledged={acknowledged})", {"network": "link(1e4, 0.3)"}
    run = run_strategy(strategy, 6, 10, simulation=dies, **setting)
    assert {event.node for event in run.of(NodeEvent)} == set(range(1, 6))
    assert sum(run.nodes[rank].state.mass for rank in range(1, 6)) <= TOTAL_MASS
    if not acknowledged:  # nothing is taken back from the dead
        assert equal_bits(run.replicas[1:], run_strategy(strategy, 6, 10, **setting).replicas[1:])
