"""Every dense collective: the order of its sum, equal bits on every rank, what it sends, and what stops it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from flockstep.collectives.base import Collective
from flockstep.collectives.binomial_tree import BinomialTree
from flockstep.collectives.double_tree import DoubleTree, trees
from flockstep.collectives.hierarchical import HierarchicalCollective
from flockstep.collectives.pipelined import Pipelined
from flockstep.collectives.rabenseifner import Rabenseifner
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.errors import RunError
from flockstep.links import shared_group
from flockstep.testing.strategies import equal_bits, run_strategy
from support.collectives import (
    CASES,
    arrays,
    binomial_sum,
    chain_sum,
    does,
    double_tree_sum,
    doubling_sum,
    ring_sum,
    summed,
    two_level_sum,
)
from support.matrix import each

WORKERS = range(1, 10)


def sent_of(run):
    return [node.sent_bytes for node in run.totals.values()]


@pytest.mark.oracle(
    "collective:ring",
    "collective:recursive_doubling",
    "collective:rabenseifner",
    "collective:binomial_tree",
    "collective:pipelined",
    "collective:double_tree",
    "collective:hierarchical",
    "collective:auto",
    "collective:sparse",
)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", WORKERS)
def test_every_rank_gets_the_sum_in_the_documented_order(name, n):
    collective, oracle = CASES[name]
    for size in sorted({0, 1, 7, n - 1, n, n + 1, 1000}):
        for dtype in ("float32", "float64"):
            given = arrays(n, size, dtype=dtype)
            run, got = summed(collective, given)
            assert equal_bits(oracle(given[:, 0]), *got), size
            if name != "auto" or dtype == "float32":  # it chooses by bytes
                item = given.dtype.itemsize
                assert sent_of(run) == [collective.sent_elements(n, size, rank) * item for rank in range(n)]


@pytest.mark.parametrize("n", WORKERS)
@pytest.mark.parametrize("size", [7, 64, 65, 1000])
@pytest.mark.parametrize("piece", [4, 12, 100])
def test_a_ring_in_pieces_has_the_bits_of_one_in_chunks(n, size, piece, monkeypatch):
    given = arrays(n, size)
    whole = summed(Ring(), given)[1]
    monkeypatch.setattr(shared_group, "PIECE", piece)
    run, got = summed(Ring(), given)
    assert all(equal_bits(a, b) for a, b in zip(got, whole, strict=True))
    means = [array for _, array in does(Ring().average, given)[1]]
    assert equal_bits(whole[0] / np.float32(n), *means)
    pieces = shared_group.ring_pieces(-(-size // n) * 4)
    assert {node.messages_sent for node in run.totals.values()} <= {2 * (n - 1) * pieces + extra for extra in range(n)}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_mean_is_the_sum_with_each_element_divided_once(name, n):
    collective, oracle = CASES[name]
    given = arrays(n, 1000)
    means = [array for _, array in does(collective.average, given)[1]]
    assert equal_bits(oracle(given[:, 0]) / np.float32(n), *means)


@pytest.mark.parametrize("name", CASES)
def test_no_delay_confuses_one_round_with_the_next(name):
    collective, oracle = CASES[name]
    for n in (4, 7):
        given = arrays(n, 12, steps=4)
        compute = "speeds(exponential(0.01), (1, 20, 1, 5, 1, 1, 9))" if n == 7 else "pareto(0.05, 1.1)"
        _, got = summed(collective, given, compute=compute, network="link(1000, 0.01)")
        assert equal_bits(oracle(given[:, -1]), *got)


@pytest.mark.parametrize("n", [6, 8, 9])
def test_the_orders_differ(n):
    """So that equal bits above say something about the order."""
    rows = arrays(n, 1000, dtype="float32")[:, 0]
    oracles = (doubling_sum, chain_sum, double_tree_sum, two_level_sum(2, ring_sum), ring_sum)
    assert len({oracle(rows).tobytes() for oracle in oracles}) == len(oracles)


@pytest.mark.parametrize("n", WORKERS)
@pytest.mark.parametrize("size", [0, 1, 7, 18])
@pytest.mark.parametrize("collective", [Ring(), Rabenseifner(), BinomialTree()], ids=str)
def test_reduce_scatter_leaves_everyone_a_part_of_the_sum(collective, n, size):
    given = arrays(n, size, dtype="float64")
    _, got = does(collective.reduce_scatter, given)
    oracle = {"ring": ring_sum, "rabenseifner": doubling_sum, "binomial_tree": chain_sum}[str(collective)]
    total = oracle(given[:, 0])
    covered = np.zeros(size, int)
    for rank, ((part, view), array) in enumerate(got):
        assert part == collective.share(n, size, rank)
        assert equal_bits(total[part], view, array[part])
        covered[part] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("n", WORKERS)
@pytest.mark.parametrize("collective", [Ring(), RecursiveDoubling(), Rabenseifner()], ids=str)
def test_gathering_and_broadcasting_and_reducing(collective, n):
    given = arrays(n, 9)

    async def gather(me, array):
        return await collective.all_gather(me, array[: me.rank + 1])

    run, got = does(gather, given)
    for pieces, _ in got:
        assert all(equal_bits(piece, given[rank, 0, : rank + 1]) for rank, piece in enumerate(pieces))
    by_doubling = n & (n - 1) == 0 and not isinstance(collective, Ring)
    messages = n.bit_length() - 1 if by_doubling else n - 1
    assert [node.messages_sent for node in run.totals.values()] == [messages] * n
    for root in {0, n // 2, n - 1}:
        _, got = does(lambda me, array, root=root: collective.broadcast(me, array, root), given)
        assert equal_bits(given[root, 0], *(array for _, array in got))
        run, got = does(lambda me, array, root=root: collective.reduce(me, array, root), given)
        assert equal_bits(binomial_sum(np.roll(given[:, 0], -root, axis=0)), got[root][1])
        assert sum(sent_of(run)) == (n - 1) * 9 * 4


@pytest.mark.parametrize("n", WORKERS)
def test_nobody_leaves_a_barrier_before_the_last_has_reached_it(n):
    reached, left = [], []

    async def meet(me, array):
        reached.append(me.rank)
        await Ring().barrier(me)
        left.append(len(reached))

    run, _ = does(meet, arrays(n, 1), compute="exponential(1)", network="link(1e6, 0.01)")
    assert left == [n] * n
    assert [node.messages_sent for node in run.totals.values()] == [(n - 1).bit_length()] * n
    assert sum(sent_of(run)) == 0


def test_no_rank_passes_on_in_both_trees():
    def check(n):
        places = [trees(n, rank) for rank in range(n)]
        assert not any(first.children and second.children for first, second in places)
        for tree in (0, 1):
            assert sum(place[tree].parent is None for place in places) == 1
            heard = sorted(child for place in places for child in place[tree].children)
            assert len(set(heard)) == len(heard) == n - 1
            assert all(places[child][tree].parent == r for r in range(n) for child in places[r][tree].children)
        assert all(DoubleTree().sent_elements(n, 100, rank) <= 200 for rank in range(n))

    each(check, range(1, 70))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_between_groups_only_shares_travel(n):
    r, size = 2, 64
    given = arrays(n, size, dtype="float64")
    run, _ = summed(HierarchicalCollective(r), given)
    crossing = sum(
        sent.message.payload_bytes
        for tag in ("reduce", "gather")
        for sent in run.sent(tag)
        if sent.message.source // r != sent.to // r
    )
    assert crossing == 2 * (n // r - 1) * size * 8


@pytest.mark.parametrize("name", [name for name in CASES if name != "auto"])
@pytest.mark.parametrize("fault", ["dies", "drops"])
def test_a_dead_worker_or_a_lost_message_is_noticed(name, fault):
    collective, _ = CASES[name]
    what = "dies(1, 0.5)" if fault == "dies" else "drops(0, 1)"
    with pytest.raises(RunError, match=r"died|lost|deadlock"):  # deadlock: nothing was to come after the lost message
        summed(collective, arrays(4, 12, steps=30), compute="constant(0.1)", network="1gbit", faults=[what])


class WrongPartner(RecursiveDoubling):
    """Negative control: in the last round the partner is one's neighbor again."""

    async def all_reduce(self, me, array):
        for distance in (1, 1):
            me.send(me.rank ^ distance, "double", array)
            array += await me.receive_array("double", me.rank ^ distance)


class MissingHop(Pipelined):
    """Negative control: the last chunk does not come back."""

    async def all_reduce(self, me, array):
        part = slice(0, len(array) // 2)
        await Pipelined.all_reduce(self, me, array[part])
        rest = array[part.stop :]
        if me.rank:
            rest += await me.receive_array("up", me.rank - 1)
        if me.rank < me.workers - 1:
            me.send(me.rank + 1, "up", rest)


@dataclass(frozen=True)
class UnequalOrder(Collective):
    """Negative control: everyone adds the others to its own array."""

    async def all_reduce(self, me, array):
        me.send_all(me.peers, "array", array)
        for peer in me.peers:
            array += await me.receive_array("array", peer)


@pytest.mark.negative_control(
    "collective:ring",
    "collective:recursive_doubling",
    "collective:rabenseifner",
    "collective:binomial_tree",
    "collective:pipelined",
    "collective:double_tree",
    "collective:hierarchical",
    "collective:auto",
    "collective:sparse",
)
@pytest.mark.parametrize("broken", [WrongPartner(), MissingHop(2), UnequalOrder()], ids=lambda c: type(c).__name__)
def test_the_checks_above_notice_a_broken_collective(broken):
    given = arrays(4, 1000)
    _, got = summed(broken, given)
    for _, oracle in CASES.values():
        assert not equal_bits(oracle(given[:, 0]), *got)


@pytest.mark.parametrize("name", ["rabenseifner", "double_tree", "hierarchical", "auto", "sparse", "ssar_doubling"])
def test_buckets_sum_several_arrays_at_once(name):
    run = run_strategy(f"bucketed(collective={name})", 3, 4)
    assert equal_bits(*run.replicas)
