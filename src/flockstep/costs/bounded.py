"""Servers under a bound on how far workers may run ahead: a recurrence over arrivals at one card."""

from __future__ import annotations

import heapq
from collections import defaultdict
from dataclasses import dataclass, field

from flockstep.costs import order_statistics
from flockstep.costs.setting import Setting

EVENTS = 40_000
"""About how many gradients are looked at, where times are random."""
CONSTANT = 48
"""Gradients of each worker, where times are constant; the first half lets them settle."""


@dataclass(frozen=True)
class Bound:
    """A bound on clocks: a worker at clock c goes on once the slowest has reached c - `slack`.

    `held`: a gradient with timestamp t takes effect once the slowest clock has reached t - slack + 1, as one update
    with the others of that timestamp; otherwise on arrival.
    """

    slack: int
    held: bool


@dataclass
class _Server:
    """What a server knows of clocks, updates, and who waits."""

    bound: Bound
    clocks: list[int]
    behind: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Clock → workers at it."""
    slowest: int = 0
    version: int = 0
    pending: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    """Timestamp → the versions that its gradients were computed on."""
    waiting: list[int] = field(default_factory=list)
    late: int = 0
    """Sum of the staleness of all gradients so far."""

    def push(self, rank: int, read: int) -> list[int]:
        """A gradient has arrived; returns those who are answered now, in order of arrival."""
        clock = self.clocks[rank]
        self.pending[clock].append(read)
        self.clocks[rank] += 1
        self.behind[clock] -= 1
        self.behind[clock + 1] += 1
        while not self.behind[self.slowest]:
            del self.behind[self.slowest]
            self.slowest += 1
        self._apply()
        self.waiting.append(rank)
        answered = [rank for rank in self.waiting if self.clocks[rank] - self.bound.slack <= self.slowest]
        if answered:
            self.waiting = [rank for rank in self.waiting if self.clocks[rank] - self.bound.slack > self.slowest]
        return answered

    def _apply(self) -> None:
        limit = self.slowest + self.bound.slack - 1 if self.bound.held else max(self.pending)
        for timestamp in sorted(self.pending):
            if timestamp <= limit:
                reads = self.pending.pop(timestamp)
                self.late += sum(self.version - read for read in reads)
                self.version += 1


def bounded(setting: Setting, bound: Bound, up: float, down: float, away: float) -> tuple[float, float]:
    """Mean seconds of a step, and mean staleness.

    A push keeps the server's card busy for `up` seconds, an answer for `down`; a gradient takes `away` seconds besides
    the latencies of both.
    """
    n, lag = setting.workers, setting.latency
    steps = CONSTANT if order_statistics.certain(setting.compute) else max(60, min(1500, EVENTS // n))
    clock = setting.compute.start(n, 0)
    server = _Server(bound, [0] * n)
    server.behind[0] = n
    reads, begun, counted = [0] * n, [0.0] * n, list[float]()
    heads = [(clock.finish(rank, 0.0) + away + lag, rank) for rank in range(n)]
    drawn = 0.0
    heapq.heapify(heads)
    into, out, late = 0.0, 0.0, 0
    for number in range(n * steps):
        head, rank = heapq.heappop(heads)
        into = max(into, head) + up
        if number == n * steps // 2:
            late = server.late
        for other in server.push(rank, reads[rank]):
            reads[other] = server.version
            out = max(out, into) + down
            if number >= n * steps // 2:
                counted.append(out + lag - begun[other])
            begun[other] = out + lag
            done = clock.finish(other, begun[other])
            drawn += (done - begun[other]) * (number >= n * steps // 2)
            heapq.heappush(heads, (done + away + lag, other))
    missed = 0.0 if setting.compute.sharing else setting.mean_compute - drawn / len(counted)  # a control variate
    return sum(counted) / len(counted) + missed, (server.late - late) / (n * steps - n * steps // 2)
