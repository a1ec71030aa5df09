"""Every consistency rule against plain numpy where messages take no time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from flockstep.records.events import Update
from flockstep.simulation.compute import ComputeModel
from flockstep.testing.strategies import COMPUTE, Bench, equal_bits, run_strategy, small_job

STEPS = 15
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
class Rule:
    """A rule in plain words: the group to apply now, if any, and who may read."""

    group: Callable[[State], list]
    admits: Callable[[State, int], bool] = lambda state, rank: True
    cancels: bool = False
    flushes: bool = True


def newer(state, rank):
    return state.read[rank][0] < state.version


def applied(state, rank):
    return all(push[0] != rank for push in state.pending)


def bounded(s):
    return lambda state, rank: state.clocks[rank] - s <= min(state.clocks)


def first(k, batch=False):
    return lambda state: sorted(state.current()[:k], key=lambda p: p[:2]) if len(state.current()) >= k else []


def chunk(k):
    return lambda state: state.pending[: k(state)] if len(state.pending) >= k(state) > 0 else []


def everything(state):
    return state.pending[:1]


def oldest(s):
    """Those of the oldest timestamp that everybody may see."""

    def group(state):
        seen = [p for p in state.pending if p[1] <= min(state.clocks) + s - 1]
        first = min((p[1] for p in seen), default=None)
        return sorted((p for p in seen if p[1] == first), key=lambda p: p[0])

    return group


RULES = {
    "bsp": (Rule(oldest(0), bounded(0)), "ps(bsp)"),
    "ssp": (Rule(oldest(2), bounded(2)), "ps(ssp(2))"),
    "asynchronous": (Rule(everything), "ps(asynchronous)"),
    "bounded_delay": (Rule(everything, bounded(2)), "ps(bounded_delay(2))"),
    "value_bound": (Rule(everything, lambda s, rank: not s.computing or s.moved < 0.02), "ps(value_bound(0.02))"),
    "softsync": (Rule(chunk(lambda s: s.n // 2)), "ps(softsync(2))"),
    "backup": (Rule(first(3), newer, cancels=True, flushes=False), "ps(backup(1))"),
    "k_sync": (Rule(first(2), newer, cancels=True, flushes=False), "ps(k_sync(2))"),
    "k_batch_sync": (Rule(first(3), cancels=True, flushes=False), "ps(k_batch_sync(3))"),
    "k_async": (Rule(chunk(lambda s: min(2, s.live)), applied), "ps(k_async(2))"),
    "k_batch_async": (Rule(chunk(lambda s: 3)), "ps(k_batch_async(3))"),
}


def oracle(rule, n=4, steps=STEPS, compute=COMPUTE):
    """The server's parameters at the end, and when the last gradient was applied."""
    bench = Bench(n, small_job())
    state = State(n, bench.start(), clocks=[0] * n)
    stepper = bench.stepper(state.w)
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
        stepper.step(state.w, sum(gradients[1:], gradients[0]) / state.w.dtype.type(len(group)))
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
                    bench.gradient(rank, state.w)  # the batch was drawn
                    steps_taken[rank] += 1
                    state.computing.discard(rank)
                    begin(rank)

    for rank in range(n):
        begin(rank)
    while due:
        now, rank = heapq.heappop(due)
        version, params = state.read[rank]
        state.pending.append((rank, state.clocks[rank], version, bench.gradient(rank, params)))
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
    assert max(update.t for update in run.of(Update)) == pytest.approx(seconds, rel=1e-12)


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


def copies_oracle(n=4, s=2, steps=STEPS, compute=COMPUTE, eager=True):
    """The server's parameters at the end: a worker computes on the newest copy it has, and its own steps since."""
    bench = Bench(n, small_job())
    state = State(n, bench.start(), clocks=[0] * n)
    stepper, own_steppers = bench.stepper(state.w), [bench.stepper(state.w) for _ in range(n)]
    durations = [ComputeModel.parse(compute).stream(0, rank) for rank in range(n)]
    params, own = [state.w.copy() for _ in range(n)], [[] for _ in range(n)]
    copies, inbox = [0] * n, [[] for _ in range(n)]
    due = [(next(durations[rank]), rank) for rank in range(n)]
    heapq.heapify(due)
    blocked = set()

    def take(rank):
        for w, slowest, held in inbox[rank]:
            copies[rank] = slowest
            params[rank] = w.copy()
            for timestamp, step in own[rank]:
                if timestamp >= held:
                    params[rank] += step
        inbox[rank] = []

    def go_on(rank, now):
        if copies[rank] < state.clocks[rank] - s:
            blocked.add(rank)
        elif state.clocks[rank] < steps:
            heapq.heappush(due, (now + next(durations[rank]), rank))

    while due:
        now, rank = heapq.heappop(due)
        gradient = bench.gradient(rank, params[rank])
        before, stepped = params[rank], params[rank].copy()
        own_steppers[rank].step(stepped, gradient)
        own[rank].append((state.clocks[rank], (stepped - before) / np.float32(n)))
        params[rank] = before + own[rank][-1][1]
        take(rank)
        slowest = min(state.clocks)
        state.pending.append((rank, state.clocks[rank], 0, gradient))
        state.clocks[rank] += 1
        go_on(rank, now)
        while group := oldest(s)(state):
            gradients = [push[3] for push in group]
            stepper.step(state.w, sum(gradients[1:], gradients[0]) / np.float32(len(group)))
            state.pending = [push for push in state.pending if all(push is not other for other in group)]
        if min(state.clocks) > slowest or not eager:
            for other in range(n) if eager else sorted(blocked):
                held = state.clocks[other] - sum(push[0] == other for push in state.pending)
                inbox[other].append((state.w.copy(), min(state.clocks), held))
        for other in sorted(blocked):
            take(other)
            if copies[other] >= state.clocks[other] - s:
                blocked.remove(other)
                go_on(other, now)
    return state.w


@pytest.mark.oracle("consistency:essp")
@pytest.mark.parametrize("compute", [COMPUTE, STRAGGLER])
@pytest.mark.parametrize("s", [0, 1, 2, 5])
def test_essp_equals_its_oracle(s, compute):
    run = run_strategy(f"ps(essp({s}))", 4, STEPS, compute=compute, network="ideal")
    assert equal_bits(run.server, copies_oracle(4, s, compute=compute), *run.replicas)


@pytest.mark.oracle("consistency:cached_ssp")
@pytest.mark.parametrize("compute", [COMPUTE, STRAGGLER])
@pytest.mark.parametrize("s", [0, 1, 2, 5])
def test_cached_ssp_equals_its_oracle(s, compute):
    run = run_strategy(f"ps(cached_ssp({s}))", 4, STEPS, compute=compute, network="ideal")
    assert equal_bits(run.server, copies_oracle(4, s, compute=compute, eager=False))


@pytest.mark.negative_control("consistency:cached_ssp")
def test_the_cached_oracle_notices_eager_servers_and_another_bound():
    w = copies_oracle(4, 2, compute=STRAGGLER, eager=False)
    for rule in ("essp(2)", "cached_ssp(1)", "ssp(2)"):
        assert not equal_bits(run_strategy(f"ps({rule})", 4, STEPS, compute=STRAGGLER, network="ideal").server, w)


@pytest.mark.negative_control("consistency:essp")
def test_the_essp_oracle_notices_another_bound_and_missing_own_writes(monkeypatch):
    w = copies_oracle(4, 2, compute=STRAGGLER)
    assert not equal_bits(run_strategy("ps(essp(1))", 4, STEPS, compute=STRAGGLER, network="ideal").server, w)
    monkeypatch.setattr("flockstep.strategies.worker_copies._missing", lambda state, held: [])
    assert not equal_bits(run_strategy("ps(essp(2))", 4, STEPS, compute=STRAGGLER, network="ideal").server, w)
