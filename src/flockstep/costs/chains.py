"""Collectives as rounds in which everyone sends one message and awaits one: what they take when workers come late.

The last worker to come finds the others' messages waiting, and is done before those that waited for it; so with random
times a step takes less than E max + cost. Where each round's partners are known, a recurrence tells how much.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import singledispatch

import numpy as np
import numpy.typing as npt

from flockstep.collectives.auto import Auto
from flockstep.collectives.base import Collective
from flockstep.collectives.rabenseifner import Rabenseifner
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.costs import order_statistics, rounds
from flockstep.costs.setting import Setting

Chain = tuple[tuple[npt.NDArray[np.intp], float], ...]
"""For each round, whom each worker hears, and the payload of every message."""

LONGEST = 512
"""Rounds of a chain that is followed; longer ones count as E max + cost."""


@singledispatch
def chain_of(collective: Collective, workers: int, nbytes: float) -> Chain | None:
    """The rounds of an all-reduce; None where they are not such."""
    return None


@chain_of.register
def _(collective: Ring, workers: int, nbytes: float) -> Chain | None:
    return around(workers, 2 * (workers - 1), nbytes / workers)


@chain_of.register
def _(collective: RecursiveDoubling, workers: int, nbytes: float) -> Chain | None:
    if workers & (workers - 1):
        return None
    return tuple((_across(workers, k), nbytes) for k in range(workers.bit_length() - 1))


@chain_of.register
def _(collective: Rabenseifner, workers: int, nbytes: float) -> Chain | None:
    if workers & (workers - 1):
        return None
    depth = workers.bit_length() - 1
    halves = [(_across(workers, k), nbytes / 2 ** (k + 1)) for k in range(depth)]
    return (*halves, *reversed(halves))


@chain_of.register
def _(collective: Auto, workers: int, nbytes: float) -> Chain | None:
    return chain_of(collective.choose(workers, round(nbytes)), workers, nbytes)


@singledispatch
def gathering(collective: Collective, workers: int, nbytes: float) -> Chain:
    """The rounds in which encodings of so many bytes are gathered: around a ring, unless it has a way of its own."""
    return around(workers, workers - 1, nbytes)


@gathering.register(RecursiveDoubling)
@gathering.register(Rabenseifner)
def _(collective: Collective, workers: int, nbytes: float) -> Chain:
    if workers & (workers - 1):
        return around(workers, workers - 1, nbytes)
    return tuple((_across(workers, k), nbytes * 2**k) for k in range(workers.bit_length() - 1))


def around(workers: int, count: int, nbytes: float) -> Chain:
    """So many rounds in which everyone hears its left neighbour."""
    left = (np.arange(workers) - 1) % workers
    return ((left, nbytes),) * count


def _across(workers: int, bit: int) -> npt.NDArray[np.intp]:
    return np.arange(workers) ^ (1 << bit)


def met(setting: Setting, moving: float, chain: Chain | None, gradients: int = 1) -> float:
    """Seconds from one meeting to the next, `gradients` gradients later.

    The meeting takes `moving` seconds when everyone comes at once, and has the rounds of `chain`, as far as known.
    """
    if even(setting) or chain is None or not 0 < len(chain) <= LONGEST:
        return order_statistics.slowest(setting.compute, setting.workers, gradients) + moving
    alone = sum(setting.message(nbytes) for _, nbytes in chain)
    longest: list[float] = []

    def turn(workers: rounds.Workers) -> None:
        at = workers.compute(gradients)
        longest.append(float((at - workers.at).max()))
        free = np.zeros_like(at)
        for sources, nbytes in chain:
            free = np.maximum(at, free) + setting.busy(nbytes)
            at = np.maximum(at, free[sources] + setting.latency)
        workers.at = at

    found = rounds.settled(setting, turn, gradients, width=8 * len(chain))
    return found + rounds.bias(setting, setting.workers, gradients, longest) + max(0.0, moving - alone)


def even(setting: Setting) -> bool:
    """Whether all workers always take the same time, so that everyone comes at once."""
    if not order_statistics.certain(setting.compute) or setting.compute.sharing:
        return order_statistics.certain(setting.compute)
    return len({order_statistics.mean_of_worker(setting.compute, rank) for rank in range(setting.workers)}) == 1


def known(setting: Setting, chain: Chain | None) -> bool:
    """Whether `met` is more than an upper bound."""
    if chain is None:
        return even(setting) and not setting.workers & (setting.workers - 1)
    return even(setting) or len(chain) <= LONGEST


def interleaved(ready: Sequence[float], counts: Sequence[int], busy: Sequence[float], latency: float) -> float:
    """When the last of several chains is through, where all workers are in step and the chains share their cards.

    Chain i is ready at a time and has so many rounds, whose messages each keep a card busy for so long.
    """
    events = [(time, i, count) for i, (time, count) in enumerate(zip(ready, counts, strict=True)) if count]
    heapq.heapify(events)
    free, end = 0.0, max(ready, default=0.0)
    while events:
        time, i, left = heapq.heappop(events)
        free = max(free, time) + busy[i]
        arrived = free + latency
        end = max(end, arrived)
        if left > 1:
            heapq.heappush(events, (arrived, i, left - 1))
    return end
