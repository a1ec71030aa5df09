"""A strategy that trains no model, but measures the durations of gradients and messages, which are in the run's record.
`flockstep calibrate` runs the strategy.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from flockstep import registry
from flockstep.messages import Array
from flockstep.nodes import Worker
from flockstep.strategies.base import Strategy, Traits

BURST = 200
"""Number of successive messages by which the time of handling a message is measured."""
LARGE = 1 << 20
"""Smallest size in bytes of the large message, because a message with a small model takes hardly longer than a message
with a single element.
"""


@dataclass(frozen=True)
class Probe(Strategy):
    """Measures gradients and messages. In half of the steps one worker after the other computes alone; in the other
    half all workers compute at the same time; then every pair of workers exchanges messages.

    The record has these scalars, in seconds. "one way a b N" is half of the median round trip of N bytes between
    workers a and b, for one element, and for the whole model or `LARGE` bytes, whichever is more. "message a b" is the
    time of each of `BURST` successive messages of one element from a to b: the time of handling a message, without the
    latency of the link. "copy r N" is the time that the cores of worker r spend on each byte that it sends or receives
    in round trips of N bytes.
    """

    rounds: int = 20

    @property
    def traits(self) -> Traits:
        """The strategy's traits: synchronous delivery, without tolerance of failures."""
        return Traits(delivery="synchronous", survives=False, results=("rank0", "mean"))

    def largest_message(self, nbytes: int) -> int:
        return max(nbytes, LARGE)

    async def worker(self, me: Worker) -> None:
        """Compute gradients alone, compute gradients while all workers compute, then exchange messages in pairs."""
        assert me.steps is not None
        alone = me.steps // 2
        for rank in range(me.workers):
            await self._together(me)
            if rank == me.rank:
                for _ in range(alone):
                    await me.gradient()
        await self._together(me)
        while me.training:
            await me.gradient()
        for pair in combinations(range(me.workers), 2):
            await self._together(me)
            if me.rank in pair:
                for size in (1, max(len(me.params), LARGE // me.params.itemsize)):
                    await self._talk(me, pair, np.zeros(size, me.params.dtype))
                await self._burst(me, *pair)

    async def _together(self, me: Worker) -> None:
        """Wait until all workers have arrived."""
        me.send_all(me.peers, "here")
        for peer in me.peers:
            await me.receive("here", peer)

    async def _burst(self, me: Worker, first: int, second: int) -> None:
        one, start = np.zeros(1, me.params.dtype), time.perf_counter()
        for _ in range(BURST):
            if me.rank == first:
                me.send(second, "many", one)
            else:
                await me.receive("many", first)
        if me.rank == second:
            me.send(first, "enough")
            return
        await me.receive("enough", second)
        me.record_scalar(f"message {first} {second}", (time.perf_counter() - start) / BURST)

    async def _talk(self, me: Worker, pair: tuple[int, int], array: Array) -> None:
        first, second = pair
        spent, busy = [], 0.0
        for number in range(self.rounds + 1):
            if number == 1:
                busy = time.process_time()
            if me.rank == second:
                await me.receive("ping", first)
                me.send(first, "pong", array)
                continue
            start = time.perf_counter()
            me.send(second, "ping", array)
            await me.receive("pong", second)
            spent.append((time.perf_counter() - start) / 2)
        busy = time.process_time() - busy
        me.record_scalar(f"copy {me.rank} {array.nbytes}", busy / (2 * self.rounds * array.nbytes))
        if spent:
            me.record_scalar(f"one way {first} {second} {array.nbytes}", statistics.median(spent[1:]))


registry.register("strategy", "flockstep_probe", Probe)
