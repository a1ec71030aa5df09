"""Every consistency rule against plain numpy where messages take no time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from flockstep.records.events import UpdateEvent
from flockstep.simulation.compute import ComputeModel
from flockstep.testing.strategies import COMPUTE, GradientSource, equal_bits, run_strategy, small_job

STEPS = 15
RATE = 0.1
"""The learning rate of `small_job`."""
STRAGGLER = "speeds(exponential(0.05), (1, 1, 2, 8))"


@dataclass
class State:
    """What the oracle knows: the server, who computes since when on what, who waits, what has not been applied."""

    n: int
    w: np.ndarray
    version: int = 0
    clocks: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)
    waiting: list[int] = field(default_factory=list)
    read: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    computing: set[int] = field(default_factory=set)
    pending: list[tuple[int, int, int, np.ndarray]] = field(default_factory=list)
    """(rank, timestamp, version, gradient) in order of arrival."""

    @property
    def live(self):
        return self.n - len(self.gone)

    @property
    def moved(self):
        """How far the server is from the oldest parameters that somebody computes on."""
        oldest = min(self.computing, key=lambda rank: self.read[rank][0])
        return np.max(np.abs(self.w - self.read[oldest][1]))

    def current(self):
        return [push for push in self.pending if push[2] == self.version]


@dataclass
class ServerUpdate:
    """A rule in plain words: the group to apply now, if any, and who may read."""

    group: Callable[[State], list]
    full: int = 4
    """Gradients that make a full step: each counts with the learning rate divided by this."""
    admits: Callable[[State, int], bool] = lambda state, rank: True
    cancels: bool = False
    flushes: bool = True


def newer(state, rank):
    return state.read[rank][0] < state.version


def applied(state, rank):
    return all(push[0] != rank for push in state.pending)


def value_bounded(bound):
    """VAP's condition with the bound v_t of the t-th version: v_0 / sqrt(t) in the theorem (Wei et al. 2013)."""
    return lambda state, rank: not state.computing or state.moved < bound(max(1, state.version))


def bounded(s):
    return lambda state, rank: state.clocks[rank] - s <= min(state.clocks)


def first(k, batch=False):
    return lambda state: sorted(state.current()[:k], key=lambda p: p[:2]) if len(state.current()) >= k else []


def chunk(k):
    return lambda state: state.pending[: k(state)] if len(state.pending) >= k(state) > 0 else []


def everything(state):
    return state.pending[:1]


def oldest(s):
    """The pushes of the oldest timestamp that all workers may see."""

    def group(state):
        seen = [p for p in state.pending if p[1] <= min(state.clocks) + s - 1]
        first = min((p[1] for p in seen), default=None)
        return sorted((p for p in seen if p[1] == first), key=lambda p: p[0])

    return group


RULES = {
    "bsp": (ServerUpdate(oldest(0), 4, bounded(0)), "ps(bsp)"),
    "ssp": (ServerUpdate(oldest(2), 4, bounded(2)), "ps(ssp(2))"),
    "ssp, sum": (ServerUpdate(oldest(2), 1, bounded(2)), "ps(ssp(2, weight=sum))"),
    "asynchronous": (ServerUpdate(everything, 1), "ps(asynchronous)"),
    "bounded_delay": (ServerUpdate(everything, 4, bounded(2)), "ps(bounded_delay(2))"),
    "bounded_delay, sum": (ServerUpdate(everything, 1, bounded(2)), "ps(bounded_delay(2, weight=sum))"),
    "value_bound": (ServerUpdate(everything, 1, value_bounded(lambda t: 0.02)), "ps(value_bound(0.02))"),
    "value_bound, decreasing": (
        ServerUpdate(everything, 1, value_bounded(lambda t: 0.1 / np.sqrt(t))),
        "ps(value_bound(0.1, decreasing=True))",
    ),
    "softsync": (ServerUpdate(chunk(lambda s: s.n // 2), 2), "ps(softsync(2))"),
    "backup": (ServerUpdate(first(3), 3, newer, cancels=True, flushes=False), "ps(backup(1))"),
    "k_sync": (ServerUpdate(first(2), 2, newer, cancels=True, flushes=False), "ps(k_sync(2))"),
    "k_batch_sync": (ServerUpdate(first(3), 3, cancels=True, flushes=False), "ps(k_batch_sync(3))"),
    "k_async": (ServerUpdate(chunk(lambda s: min(2, s.live)), 2, applied), "ps(k_async(2))"),
    "k_batch_async": (ServerUpdate(chunk(lambda s: 3), 3), "ps(k_batch_async(3))"),
}


def oracle(rule, n=4, steps=STEPS, compute=COMPUTE):
    """The server's parameters at the end, and when the last gradient was applied."""
    source = GradientSource(n, small_job())
    state = State(n, source.start(), clocks=[0] * n)
    durations = [ComputeModel.parse(compute).stream(0, rank) for rank in range(n)]
    steps_taken, due, now, last = [0] * n, [], 0.0, 0.0

    def begin(rank):
        state.read[rank] = (state.version, state.w.copy())
        if steps_taken[rank] == steps:
            state.gone.add(rank)
            return
        state.computing.add(rank)
        heapq.heappush(due, (now + next(durations[rank]), rank))

    def apply(group):
        nonlocal last
        gradients = [push[3] for push in group]
        mean = sum(gradients[1:], gradients[0]) / np.float32(len(group))
        state.w -= np.float32(RATE * len(group) / rule.full) * mean
        state.version, last = state.version + 1, now
        state.pending = [push for push in state.pending if all(push is not other for other in group)]
        if rule.cancels:
            state.pending = state.current()

    def settle():
        before = None
        while before != (state.version, len(state.gone), len(state.waiting)):
            before = (state.version, len(state.gone), len(state.waiting))
            start = state.version
            while group := rule.group(state):
                apply(group)
            admitted = [rank for rank in state.waiting if rule.admits(state, rank)]
            state.waiting = [rank for rank in state.waiting if rank not in admitted]
            for rank in admitted:
                begin(rank)
            if rule.cancels and state.version > start:
                late = [(t, rank) for t, rank in due if state.read[rank][0] < state.version]
                for entry in late:
                    due.remove(entry)
                heapq.heapify(due)
                for _, rank in sorted(late, key=lambda entry: entry[1]):
                    source.gradient(rank, state.w)  # the batch was drawn
                    steps_taken[rank] += 1
                    state.computing.discard(rank)
                    begin(rank)

    for rank in range(n):
        begin(rank)
    while due:
        now, rank = heapq.heappop(due)
        version, params = state.read[rank]
        state.pending.append((rank, state.clocks[rank], version, source.gradient(rank, params)))
        state.computing.discard(rank)
        steps_taken[rank] += 1
        state.clocks[rank] += 1
        state.waiting.append(rank)
        settle()
    if rule.flushes and state.pending:
        apply(list(state.pending))
    return state.w, last


@pytest.mark.oracle(
    "consistency:bsp", "consistency:ssp", "consistency:asynchronous", "consistency:bounded_delay",
    "consistency:value_bound", "consistency:softsync", "consistency:backup", "consistency:k_sync",
    "consistency:k_batch_sync", "consistency:k_async", "consistency:k_batch_async",
)  # fmt: skip
@pytest.mark.parametrize("compute", [COMPUTE, STRAGGLER])
@pytest.mark.parametrize("name", RULES)
def test_equals_the_oracle(name, compute):
    rule, text = RULES[name]
    w, seconds = oracle(rule, compute=compute)
    run = run_strategy(text, 4, STEPS, compute=compute, network="ideal")
    assert equal_bits(run.server, w)
    assert max(update.seconds for update in run.of(UpdateEvent)) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.negative_control(
    "consistency:bsp", "consistency:ssp", "consistency:asynchronous", "consistency:bounded_delay",
    "consistency:value_bound", "consistency:softsync", "consistency:backup", "consistency:k_sync",
    "consistency:k_batch_sync", "consistency:k_async", "consistency:k_batch_async",
)  # fmt: skip
def test_the_oracle_tells_every_rule_from_every_other():
    ends = {name: run_strategy(text, 4, STEPS, compute=STRAGGLER, network="ideal") for name, (_, text) in RULES.items()}
    for name, (rule, _) in RULES.items():
        w, _ = oracle(rule, compute=STRAGGLER)
        assert [other for other, run in ends.items() if equal_bits(run.server, w)] == [name]


def table(reads, n=4, s=2, steps=STEPS, compute=COMPUTE, weight="mean", own_writes=True):
    """The parameters at the end, of SSPTable (Ho et al. 2013) and ESSPTable (Dai et al. 2015), as sums over updates.

    An update u(q, t) = -eta g, or -eta g / n, is added once, whoever else's are added with it. A worker at clock c
    reads theta_0 + the sum of u(q, t) over those that it may see: all with t <= c - s - 1, its own, and of the rest
    what the server holds, which is t <= slowest + s - 1. `reads`: "ssp" asks with every push, "cached_ssp" when its
    copy is too old, "essp" is sent a copy whenever the slowest clock advances.
    """
    source = GradientSource(n, small_job(dtype="float64"))
    start, rate = source.start(), RATE / n if weight == "mean" else RATE
    durations = [ComputeModel.parse(compute).stream(0, rank) for rank in range(n)]
    updates, clocks = {}, [0] * n
    copies, known, inbox = [set() for _ in range(n)], [0] * n, [[] for _ in range(n)]
    due = [(next(durations[rank]), rank, frozenset()) for rank in range(n)]
    heapq.heapify(due)
    blocked = set()

    def theta(seen):
        return start + sum(updates[key] for key in sorted(seen))

    def held():
        return {(q, t) for q, t in updates if t <= min(clocks) + s - 1}

    def go_on(rank, now):
        for seen, slowest in inbox[rank]:
            copies[rank], known[rank] = seen, slowest
        inbox[rank] = []
        if known[rank] < clocks[rank] - s or (reads == "ssp" and (rank, clocks[rank] - 1) not in copies[rank]):
            blocked.add(rank)
        elif clocks[rank] < steps:
            own = {(rank, t) for t in range(clocks[rank])} if own_writes else set()
            heapq.heappush(due, (now + next(durations[rank]), rank, frozenset(copies[rank] | own)))

    while due:
        now, rank, seen = heapq.heappop(due)
        updates[rank, clocks[rank]] = -rate * source.gradient(rank, theta(seen))
        slowest = min(clocks)
        clocks[rank] += 1
        go_on(rank, now)
        for other in range(n):
            if (min(clocks) > slowest) if reads == "essp" else (other in blocked and min(clocks) >= clocks[other] - s):
                inbox[other].append((held(), min(clocks)))
        for other in sorted(blocked):
            if inbox[other] and inbox[other][-1][1] >= clocks[other] - s:
                blocked.remove(other)
                go_on(other, now)
    return theta(updates)


def tables(reads, s, compute, weight="mean"):
    """The servers' final parameters in a run, and those of the oracle."""
    job = small_job(dtype="float64")
    text = f"ps({reads}({s}{', weight=sum' if weight == 'sum' else ''}))"
    run = run_strategy(text, 4, STEPS, job=job, compute=compute, network="ideal")
    return run, table(reads, 4, s, compute=compute, weight=weight)


def apart(one, other):
    """The largest difference of two arrays; differences by rounding are below 1e-12."""
    return float(np.max(np.abs(one - other)))


@pytest.mark.oracle("consistency:ssp", "consistency:essp", "consistency:cached_ssp")
@pytest.mark.parametrize("weight", ["mean", "sum"])
@pytest.mark.parametrize("compute", [COMPUTE, STRAGGLER])
@pytest.mark.parametrize("s", [0, 1, 2, 5])
@pytest.mark.parametrize("reads", ["ssp", "essp", "cached_ssp"])
def test_equals_the_sum_over_updates_of_the_paper(reads, s, compute, weight):
    run, theta = tables(reads, s, compute, weight)
    assert apart(run.server, theta) < 1e-12
    if reads == "essp":
        assert all(apart(replica, theta) < 1e-12 for replica in run.replicas)


@pytest.mark.negative_control("consistency:ssp", "consistency:essp", "consistency:cached_ssp")
@pytest.mark.parametrize("reads", ["ssp", "essp", "cached_ssp"])
def test_the_sum_over_updates_notices_another_bound_another_table_and_another_weight(reads):
    run, _ = tables(reads, 2, STRAGGLER)
    wrong = [
        table(reads, s=1, compute=STRAGGLER),
        table(reads, s=2, compute=STRAGGLER, weight="sum"),
        *(table(other, s=2, compute=STRAGGLER) for other in ("ssp", "essp", "cached_ssp") if other != reads),
    ]
    assert all(apart(run.server, theta) > 1e-4 for theta in wrong)


@pytest.mark.parametrize("workers", [3, 5, 7])
@pytest.mark.parametrize("n", [2, 3])
def test_softsync_takes_the_floor_of_workers_over_n(n, workers):
    """c = floor(lambda / n) gradients make a step (Gupta et al. 2016), where n does not divide lambda too."""
    run = run_strategy(f"ps(softsync({n}))", workers, 6, network="ideal")
    sizes = Counter(update.seconds for update in run.of(UpdateEvent)).values()
    assert max(sizes) == workers // n
    assert {update.weight for update in run.of(UpdateEvent)} == {1 / (workers // n)}
