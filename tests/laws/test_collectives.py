"""All-reduce: the order of the sum, equal bits on every rank, and what travels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.collectives import recursive_doubling
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.errors import ProtocolError
from flockstep.messages import Message
from flockstep.strategies.base import Strategy, Traits
from flockstep.testing.strategies import bowl_job, equal_bits, run_strategy
from support.collectives import arrays, summed

WORKERS = range(1, 10)


@pytest.mark.parametrize("n", WORKERS)
@pytest.mark.parametrize("size", [1, 7, 18, 64])
def test_ring_sends_twice_n_less_one_messages_and_that_many_models_over_all(n, size):
    run, _ = summed(Ring(), arrays(n, size))
    nodes = list(run.totals.values())
    assert [node.messages_sent for node in nodes] == [2 * (n - 1)] * n
    assert sum(node.sent_bytes for node in nodes) == 2 * (n - 1) * size * 4
    chunks = [part.stop - part.start for part in slices(size, n)]
    spared = [chunks[(rank + 1) % n] + chunks[(rank + 2) % n] for rank in range(n)]
    assert [node.sent_bytes for node in nodes] == [(2 * size - s) * 4 if n > 1 else 0 for s in spared]
    assert [node.received_bytes for node in nodes] == [node.sent_bytes for node in nodes[-1:] + nodes[:-1]]


@pytest.mark.parametrize("n", WORKERS)
def test_recursive_doubling_sends_the_whole_array_in_each_round(n):
    run, _ = summed(RecursiveDoubling(), arrays(n, 18))
    rounds = n.bit_length() - 1
    power, folded = 1 << rounds, n - (1 << rounds)
    expected = [1 if rank >= power else rounds + (rank < folded) for rank in range(n)]
    assert [node.messages_sent for node in run.totals.values()] == expected
    assert [node.sent_bytes for node in run.totals.values()] == [messages * 18 * 4 for messages in expected]


@dataclass(frozen=True)
class Doubled(Strategy):
    """Averages, and sums, the replicas with a collective whose sum is twice as large."""

    collective: Collective

    @property
    def traits(self):
        return Traits(delivery="synchronous", survives=False, results=("rank0",))

    async def worker(self, me):
        while me.training:
            await me.gradient()
            me.params[:] = me.rank + 1
            mean, summed, given = np.zeros_like(me.params), me.params.copy(), me.params.copy()
            await self.collective.average_of(me, given, mean)
            await self.collective.all_reduce(me, summed)
            await self.collective.average(me, me.params)
            assert equal_bits(mean, me.params, summed / me.workers)


class OwnSum:
    async def all_reduce(self, me, array):
        await super().all_reduce(me, array)
        array *= 2


class OwnDividedSum:
    async def divided_sum(self, me, array, divisor):
        await super().divided_sum(me, array, divisor)
        array *= 2


@pytest.mark.parametrize("own", [OwnSum, OwnDividedSum])
@pytest.mark.parametrize("kind", [Ring, ByHost, RecursiveDoubling])
def test_a_class_that_overrides_one_of_the_sums_does_not_inherit_the_other_one(own, kind):
    """`average` calls `divided_sum`, which a ring and a collective by hosts define beside `all_reduce`."""
    custom = type("Custom", (own, kind), {})
    run = run_strategy(Doubled(custom()), 3, 1, job=bowl_job(dimension=7))
    assert all((replica == 2 * 2.0).all() for replica in run.replicas)


class CallsDividedSum:
    async def all_reduce(self, me, array):
        await self.divided_sum(me, array, 1)
        array *= 2


def test_a_class_that_defines_both_sums_may_call_one_from_the_other():
    custom = type(
        "Custom", (CallsDividedSum, Ring), {"divided_sum": Ring.divided_sum, "all_reduce": CallsDividedSum.all_reduce}
    )
    _, got = summed(custom(), arrays(3, 7))
    assert equal_bits(*got)


@pytest.mark.parametrize(
    "note", [{}, {"2": 2}, {"2": 2, "3": "x"}, {"2": -1, "3": 5}, {"2": 2, "3": 3}, {"2": 2.0, "3": 2}]
)
def test_a_message_that_is_not_of_the_arrays_that_it_announces_is_refused(note):
    with pytest.raises(ProtocolError, match="worker 2 sent 4 elements as the arrays of ranks 2, 3"):
        recursive_doubling._sizes(Message(2, "double", np.zeros(4), note), [2, 3])
    good = Message(2, "double", np.zeros(4), {"2": 1, "3": 3, "call": 7})
    assert recursive_doubling._sizes(good, [2, 3]) == {2: 1, 3: 3}
