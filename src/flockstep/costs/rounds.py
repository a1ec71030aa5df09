"""Recurrences over rounds of messages: what a round takes in the mean where no formula is known.

With constant times they reach a fixed round after a few, and are then exact; random times are drawn from the law's own
streams, always the same. Cards serve messages in order of arrival, as in `flockstep.simulation.network`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.costs import order_statistics
from flockstep.costs.setting import Setting
from flockstep.errors import ConfigurationError
from flockstep.simulation.compute import Clock

Times = npt.NDArray[np.float64]

SETTLE = 24
"""Rounds until constant times repeat themselves; as many count."""
STEADY, EQUAL = 4, 1e-12
"""Turns after which constant times have settled, if in each of them all workers took the same time, up to rounding."""
WORK = 5_000_000
"""About how many numbers are handled in all."""
DRAWS = 200_000
"""About how many gradients are drawn in all, where times are random."""


class Workers:
    """The workers of a recurrence: since when each computes, and when it is done."""

    def __init__(self, setting: Setting):
        self.count = setting.workers
        self._clock: Clock = setting.compute.start(setting.workers, 0)
        streams = [] if setting.compute.sharing else [setting.compute.stream(0, rank) for rank in range(self.count)]
        self._next = [stream.__next__ for stream in streams]  # cores of their own: the order of draws does not matter
        always = bool(streams) and order_statistics.certain(setting.compute)
        self._always: Times | None = np.array([draw() for draw in self._next]) if always else None
        self.at: Times = np.zeros(setting.workers)

    def compute(self, times: int = 1) -> Times:
        """When each has computed that many gradients, from where it is; does not move it."""
        if self._always is not None:
            return self.at + times * self._always
        done = self.at.copy()
        for _ in range(times):
            if self._next:
                done += [draw() for draw in self._next]
                continue
            for rank in map(int, np.argsort(done, kind="stable")):
                done[rank] = self._clock.finish(rank, float(done[rank]))
        return done


def settled(setting: Setting, turn: Callable[[Workers], None], gradients: int = 1, width: int = 1) -> float:
    """Mean seconds that a turn takes, which moves every worker on by so many gradients.

    `width`: numbers that a turn handles for each worker.
    """
    workers = Workers(setting)
    certain = order_statistics.certain(setting.compute)
    most = max(4 if certain else 12, WORK // (setting.workers * width))
    drawn = max(4 if certain else 12, DRAWS // (setting.workers * gradients))
    count = min(SETTLE if certain else setting.turns, most, drawn)
    skip = count if certain else count // 8
    begun, alike = 0.0, 0
    for number in range(skip + count):
        if number == skip:
            begun = float(workers.at.mean())
        before = workers.at.copy()
        turn(workers)
        if not certain:
            continue
        took = workers.at - before
        alike = alike + 1 if np.ptp(took) <= EQUAL * took[0] else 0
        if alike == STEADY:  # everyone is as much later as in the turns before: so it goes on
            return float(took.mean())
    return (float(workers.at.mean()) - begun) / count


def served(arrivals: Times, busy: float, before: float | Times = 0.0) -> Times:
    """When a card has passed each message, along the last axis in order of arrival; `before`: when it is free."""
    count = np.arange(arrivals.shape[-1]) * busy
    ends: Times = np.maximum.accumulate(np.maximum(arrivals, before) - count, axis=-1) + count + busy
    return ends


def counted(values: Sequence[float]) -> float:
    """The mean over the rounds that count."""
    kept = values[len(values) // 2 :] if len(values) <= 2 * SETTLE else values[len(values) // 9 :]
    return sum(kept) / len(kept)


def bias(setting: Setting, k: int, gradients: int, drawn: Sequence[float]) -> float:
    """What the draws' own k-th fastest misses of its mean: a control variate."""
    if order_statistics.certain(setting.compute) or setting.compute.sharing:
        return 0.0
    try:
        exact = order_statistics.fastest(setting.compute, k, setting.workers, gradients)
    except ConfigurationError:
        return 0.0
    return exact - counted(drawn)


@dataclass(frozen=True)
class Pattern:
    """Who sends to whom in a round, all messages of one size; row r is about what worker r receives."""

    senders: npt.NDArray[np.intp]
    """(n, d): those that r hears; 0 where there are fewer."""
    turns: Times
    """(n, d): how many messages they send before that to r; infinite where there are fewer."""
    sends: Times
    """(n,): messages that each sends."""
    hears: npt.NDArray[np.intp]
    """(n,): messages that each receives."""

    @classmethod
    def of(cls, orders: Sequence[Sequence[int]]) -> Pattern:
        """From the receivers of each worker, in the order in which it sends."""
        n = len(orders)
        heard: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        for sender, order in enumerate(orders):
            for turn, receiver in enumerate(order):
                heard[receiver].append((sender, turn))
        most = max(1, *map(len, heard))
        senders, turns = np.zeros((n, most), np.intp), np.full((n, most), np.inf)
        for receiver, known in enumerate(heard):
            for place, (sender, turn) in enumerate(known):
                senders[receiver, place], turns[receiver, place] = sender, turn
        sends = np.array([len(order) for order in orders], float)
        return cls(senders, turns, sends, np.array([len(known) for known in heard], np.intp))

    @property
    def width(self) -> int:
        """Most messages that one receives."""
        return int(self.turns.shape[1])


class Cards:
    """The workers' cards: until when each is busy with sending, and with receiving."""

    def __init__(self, setting: Setting):
        self._latency = setting.latency
        self._out: Times = np.zeros(setting.workers)
        self._into: Times = np.zeros(setting.workers)

    def exchange(self, at: Times, pattern: Pattern, busy: float) -> Times:
        """Everyone begins to send at its time; when each has all that it is to hear, or its own time."""
        begins = np.maximum(at, self._out)
        self._out = np.where(pattern.sends > 0, begins + pattern.sends * busy, self._out)
        heads = begins[pattern.senders] + pattern.turns * busy + self._latency if busy else at[pattern.senders]
        heads = np.where(np.isinf(pattern.turns), np.inf, heads + (0 if busy else self._latency))
        ends = served(np.sort(heads, axis=1), busy, self._into[:, None])
        last = np.take_along_axis(ends, np.maximum(pattern.hears - 1, 0)[:, None], 1)[:, 0]
        self._into = np.where(pattern.hears > 0, last, self._into)
        found: Times = np.where(pattern.hears > 0, last, at)
        return found


def rotated(workers: int) -> Pattern:
    """Everyone to everyone else, each beginning with the next rank."""
    ranks, turns = np.arange(workers)[:, None], np.arange(workers - 1)[None, :]
    return _everyone((ranks - 1 - turns) % workers, np.broadcast_to(turns, (workers, workers - 1)))


def ascending(workers: int) -> Pattern:
    """Everyone to everyone else, in order of rank."""
    ranks, others = np.arange(workers)[:, None], np.arange(workers - 1)[None, :]
    senders = others + (others >= ranks)  # all ranks but one's own
    return _everyone(senders, ranks - (senders < ranks))


def _everyone(senders: npt.NDArray[np.intp], turns: npt.NDArray[np.intp]) -> Pattern:
    count = len(senders) - 1
    each = np.full(count + 1, count, np.intp)
    return Pattern(senders, turns.astype(np.float64), each.astype(np.float64), each)
