"""A card that many workers share, each of which comes back when it has computed: a closed queue."""

from __future__ import annotations

import heapq
import itertools

from flockstep.costs import order_statistics
from flockstep.costs.setting import Setting


def cycles(setting: Setting, away: float, passing: float, busy: float, gradients: int = 1) -> list[float]:
    """Seconds that each worker takes for `gradients` gradients and one visit to the card, in the mean.

    It is `away` from the card for so long besides computing, `passing` through it on a free one, and keeps it `busy`.
    Constant times: workers settle where they do not meet, so that a visit costs what it costs alone, or the card is
    always busy. Random times: mean value analysis (Reiser & Lavenberg 1980) with a constant time of service, of which
    the one under way has, in the mean, half left (Reiser 1979).
    """
    means = computing(setting, gradients, away + passing)
    alone = [mean + away + passing for mean in means]
    if order_statistics.certain(setting.compute):
        return _spread(alone, busy)
    waits = waiting(setting.workers, sum(alone) / len(alone) - busy, busy)
    return [time + waits for time in alone]


def computing(setting: Setting, gradients: int = 1, away: float = 0.0) -> list[float]:
    """Mean seconds of so many gradients of each worker that is `away` from its core for so long between them.

    Where workers share cores, they queue for them.
    """
    n, cores = setting.workers, setting.compute.sharing
    means = [gradients * order_statistics.mean_of_worker(setting.compute, rank) for rank in range(n)]
    if cores is None or cores >= n:
        return means
    queues = [n // cores + (rank % cores < n % cores) for rank in range(n)]
    certain = order_statistics.certain(setting.compute)
    return [
        max(mean, count * mean - away)
        if certain
        else mean + gradients * waiting(count, away / gradients, mean / gradients)
        for mean, count in zip(means, queues, strict=True)
    ]


def waiting(workers: int, away: float, busy: float) -> float:
    """Mean seconds that a worker waits for the card, besides its own `busy` ones there, when it is `away` otherwise."""
    there, used, wait = 0.0, 0.0, 0.0
    for count in range(1, workers + 1):  # one more worker, who sees the queue of the others
        wait = busy * (there - used) + used * busy / 2
        wait = max(wait, count * busy - away - busy, 0.0)
        rate = count / (away + busy + wait) if away + busy + wait else 0.0
        there, used = rate * (busy + wait), rate * busy
    return wait


def _spread(alone: list[float], busy: float) -> list[float]:
    """Constant times: where the card is asked for more than it can do, the fastest come round equally often."""

    def asked(least: float) -> float:
        return sum(busy / max(time, least) for time in alone)

    low, high = 0.0, len(alone) * busy
    if not busy or (all(alone) and asked(low) <= 1):
        return alone
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if middle == 0 or asked(middle) > 1 else (low, middle)
    return [max(time, high) for time in alone]


def rates(periods: list[float]) -> float:
    """Gradients of workers with these periods, over those of as many workers with the mean period: 1 and more."""
    return sum(periods) * sum(1 / one for one in periods) / len(periods) ** 2 if all(periods) else 1.0


EVENTS = 40_000
"""About how many visits are looked at, where times are random."""
CONSTANT, FEWEST = 64, 24
"""Visits of each worker, where times are constant, and of very many; the first half lets them settle."""


def visits(
    setting: Setting, gradients: int, asking: float, answer: float, after: float, ahead: bool = False
) -> list[float]:
    """Seconds of each worker's round: it computes so many gradients, asks, is answered, and sends something more.

    The three are payloads; a recurrence over arrivals at the server's card, in both directions. `ahead`: the worker
    asks before it computes, and waits for the answer after that.
    """
    n, lag = setting.workers, setting.latency
    certain = order_statistics.certain(setting.compute)
    count = max(FEWEST, min(CONSTANT, EVENTS // (4 * n))) if certain else max(40, min(1500, EVENTS // (n * gradients)))
    clock = setting.compute.start(n, 0)
    begun, free = [0.0] * n, [0.0] * n  # since when a worker computes; when its own card can send
    heads: list[tuple[float, int, int, bool]] = []  # equal times in the order in which they were found
    drawn, spent, ready, into, out = [0.0] * n, [0.0] * n, [0.0] * n, 0.0, 0.0
    seen, number, half = [0] * n, itertools.count(), count // 2

    def ask(rank: int) -> float:
        at = begun[rank]
        for _ in range(gradients):
            at = clock.finish(rank, at)
        leaves = max(begun[rank] if ahead else at, free[rank])
        ready[rank] = at
        free[rank] = leaves + setting.busy(asking)
        heapq.heappush(heads, (leaves + lag, next(number), rank, True))
        return at - begun[rank]

    for rank in range(n):
        ask(rank)
    while heads:
        head, _, rank, asks = heapq.heappop(heads)
        into = max(into, head) + setting.busy(asking if asks else after)
        if not asks:
            continue
        out = max(out, into) + setting.busy(answer)
        took = max(out + lag, ready[rank]) - begun[rank]
        begun[rank] += took
        seen[rank] += 1
        if after:
            heapq.heappush(heads, (max(begun[rank], free[rank]) + lag, next(number), rank, False))
            free[rank] = max(begun[rank], free[rank]) + setting.busy(after)
        if seen[rank] < count:
            drawn[rank] += ask(rank) * (seen[rank] >= half)
        spent[rank] += took * (seen[rank] > half)
    return _per_round(setting, gradients, spent, drawn, count - half)


def _per_round(setting: Setting, gradients: int, spent: list[float], drawn: list[float], rounds: int) -> list[float]:
    """Seconds of each worker's round; random gradients with their mean in place of what was drawn for them."""
    if order_statistics.certain(setting.compute) or setting.compute.sharing:
        return [one / rounds for one in spent]
    means = [gradients * order_statistics.mean_of_worker(setting.compute, rank) for rank in range(setting.workers)]
    return [mean + (one - busy) / rounds for one, mean, busy in zip(spent, means, drawn, strict=True)]
