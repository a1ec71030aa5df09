"""Collectives over several hosts: sums, equal bits on every rank, and what crosses from host to host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flockstep.arrays.schema import slices
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.collectives.exchange import tree
from flockstep.collectives.group import Subgroup
from flockstep.collectives.recursive_doubling import RecursiveDoubling
from flockstep.collectives.ring import Ring
from flockstep.errors import ProtocolError
from flockstep.nodes import Hosts, one_host
from flockstep.programs import HostArrays, SharedArrays
from flockstep.strategies.all_reduce import AllReduce
from flockstep.testing.strategies import equal_bits, run_strategy
from support.collectives import arrays, does, ring_sum, summed

PLACES: list[Hosts] = [
    ((0, 1), (2, 3)),
    ((0, 2), (1, 3)),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1), (2, 3), (4, 5)),
    ((0,), (1, 2, 3)),
    ((0, 3, 4), (1, 2), (5, 6, 7)),
    ((0,), (1,), (2,)),
    ((0, 1, 2),),
]


def over(hosts: Hosts, what: Any, given: Any) -> tuple[Any, list[Any], dict[int, int]]:
    """A run with these hosts: what each rank got, and the bytes that left each host."""
    place = {rank: number for number, host in enumerate(hosts) for rank in host}
    crossed = dict.fromkeys(range(len(hosts)), 0)

    async def placed(me: Any, array: Any) -> Any:
        me.hosts, send = hosts, me.port.send

        def counted(to: int, message: Any) -> None:
            crossed[place[me.rank]] += message.payload_bytes if place[to] != place[me.rank] else 0
            send(to, message)

        me.port.send = counted
        try:
            return await what(me, array)
        finally:
            me.port.send = send

    run, got = does(placed, given)
    return run, got, crossed


def sums(hosts: Hosts, collective: Collective, given: Any) -> tuple[list[Any], dict[int, int]]:
    _, got, crossed = over(hosts, collective.all_reduce, given)
    return [array for _, array in got], crossed


def ids(hosts: object) -> str:
    return str(hosts).replace(" ", "")


@pytest.mark.oracle("collective:by_host")
@pytest.mark.parametrize("hosts", PLACES, ids=ids)
@pytest.mark.parametrize("collective", [ByHost(), ByHost(RecursiveDoubling())], ids=str)
def test_every_rank_gets_the_sum_with_the_same_bits(hosts: Hosts, collective: ByHost) -> None:
    n = sum(map(len, hosts))
    for size in (0, 1, 7, 1000):
        given = arrays(n, size)
        got, _ = sums(hosts, collective, given)
        assert equal_bits(*got)
        np.testing.assert_allclose(got[0], given[:, 0].astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-6)
        means = [array for _, array in over(hosts, collective.average, given)[1]]
        assert equal_bits(got[0] / np.float32(n), *means)


@pytest.mark.parametrize("hosts", PLACES, ids=ids)
def test_a_host_sends_what_a_ring_of_hosts_sends(hosts: Hosts) -> None:
    """2(h-1)/h of the array leaves every host, whatever the number of its workers."""
    n, h, size = sum(map(len, hosts)), len(hosts), 1200
    _, crossed = sums(hosts, ByHost(), arrays(n, size))
    assert set(crossed.values()) == {2 * (h - 1) * size // h * 4}
    if 1 < h < n:
        assert sum(sums(hosts, Ring(), arrays(n, size))[1].values()) > sum(crossed.values())


@pytest.mark.parametrize("n", [1, 2, 5])
def test_on_one_host_it_is_the_flat_collective(n: int) -> None:
    given = arrays(n, 1000)
    (run, got), (plain, expected) = summed(ByHost(), given), summed(Ring(), given)
    assert equal_bits(ring_sum(given[:, 0]), *got, *expected)
    assert run.seconds == plain.seconds
    default, named = (run_strategy(text, 4, 3) for text in ("all_reduce", "all_reduce(ring)"))
    assert equal_bits(default.params[0], named.params[0])
    assert default.seconds == named.seconds
    assert AllReduce().collective == ByHost()


@pytest.mark.parametrize("hosts", PLACES, ids=ids)
def test_gathering_broadcasting_and_reducing(hosts: Hosts) -> None:
    n = sum(map(len, hosts))
    given, others = arrays(n, 60), len(hosts) - 1

    async def gather(me: Any, array: Any) -> Any:
        return await ByHost().all_gather(me, array[: me.rank + 1])

    for pieces, _ in over(hosts, gather, given)[1]:
        assert all(equal_bits(piece, given[rank, 0, : rank + 1]) for rank, piece in enumerate(pieces))
    for root in range(n):
        _, got, crossed = over(hosts, lambda me, a, root=root: ByHost().broadcast(me, a, root), given)
        assert equal_bits(given[root, 0], *(array for _, array in got))
        assert sum(crossed.values()) == others * 60 * 4
        _, got, crossed = over(hosts, lambda me, a, root=root: ByHost().reduce(me, a, root), given)
        np.testing.assert_allclose(got[root][1], given[:, 0].sum(axis=0), rtol=1e-5, atol=1e-6)
        assert sum(crossed.values()) == others * 60 * 4
    _, got, _ = over(hosts, ByHost().reduce_scatter, given)
    for rank, ((part, view), _) in enumerate(got):
        assert part == ByHost().share(n, 60, rank)
        np.testing.assert_allclose(view, given[:, 0, part].sum(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hosts", PLACES, ids=ids)
def test_a_tree_over_hosts_reaches_every_rank_once(hosts: Hosts) -> None:
    n = sum(map(len, hosts))
    for root in range(n):
        places = {rank: tree(hosts, rank, root) for rank in range(n)}
        assert sorted(child for _, below in places.values() for child in below) == sorted(set(range(n)) - {root})
        assert all(places[child][0] == rank for rank, (_, below) in places.items() for child in below)


def test_a_subgroup_knows_the_hosts_of_its_members() -> None:
    class Me:
        rank, workers, random, hosts = 4, 8, None, ((0, 3, 4), (1, 2), (5, 6, 7))

    assert Subgroup(Me(), [4, 1, 0, 7]).hosts == ((0, 2), (1,), (3,))  # type: ignore[arg-type]
    Me.hosts = one_host(8)  # type: ignore[assignment]
    assert Subgroup(Me(), [4, 1]).hosts == ((0, 1),)  # type: ignore[arg-type]


@pytest.mark.negative_control("collective:by_host")
def test_a_share_that_nobody_sums_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.collectives.by_host.slices", lambda size, n: [slice(0), *slices(size, n)[1:]])
    given = arrays(4, 100)
    got, _ = sums(((0, 1), (2, 3)), ByHost(), given)
    assert not np.allclose(got[0], given[:, 0].sum(axis=0), rtol=1e-3)


class Regions:
    """Memory that the workers of a host share, as in a background task: no worker waits in it."""

    def __init__(self, hosts: Hosts, size: int):
        self.hosts = hosts
        self.of = [np.zeros(size, np.float32) for host in hosts for _ in host]
        self.counted: list[tuple[int, int]] = []

    def seen_by(self, me: Any) -> Any:
        regions, (host,) = self, [host for host in self.hosts if me.rank in host]
        start = self.of[me.rank].ctypes.data

        class Memory(SharedArrays):
            def corresponding(self, array: Any) -> HostArrays | None:
                first = (array.ctypes.data - start) // 4
                if not 0 <= first <= len(regions.of[me.rank]) - len(array):
                    return None
                return HostArrays(4 * first, [regions.of[rank][first : first + len(array)] for rank in host])

            def count(self, array: Any, shares: int) -> None:
                regions.counted.append((array.nbytes, shares))

        return Memory()


@pytest.mark.parametrize("hosts", PLACES[:6], ids=ids)
@pytest.mark.parametrize("in_place", [False, True])
def test_shares_that_workers_of_a_host_read_and_write_have_the_bits_of_messages(hosts: Hosts, in_place: bool) -> None:
    """Only signals are sent within a host, and the array that is averaged stays as it is unless it is replaced."""
    size = 1001
    given = arrays(sum(map(len, hosts)), size)
    regions = Regions(hosts, 2 * size)

    async def through_memory(me: Any, array: Any) -> Any:
        own = regions.of[me.rank]
        if len(host_of(me.rank)) > 1:  # as in a run, a worker alone on its host shares no memory
            me.shared = regions.seen_by(me)
        own[:size] = array
        if in_place:
            await ByHost().average(me, own[:size])
            return own[:size].copy()
        await ByHost().average_of(me, own[:size], own[size:])
        assert equal_bits(own[:size], given[me.rank, 0])
        return own[size:].copy()

    sent: list[str] = []

    async def watched(me: Any, array: Any) -> Any:
        send = me.port.send
        me.port.send = lambda to, message: (
            sent.append(message.tag) if message.payload_bytes and {me.rank, to} <= host_of(me.rank) else None,
            send(to, message),
        )
        try:
            return await through_memory(me, array)
        finally:
            me.port.send = send

    def host_of(rank: int) -> set[int]:
        return next(set(host) for host in hosts if rank in host)

    means = [mean for mean, _ in over(hosts, watched, given)[1]]
    expected = [array for _, array in over(hosts, ByHost().average, given)[1]]
    assert equal_bits(expected[0], *means)
    assert not sent
    assert regions.counted == [(4 * size, min(map(len, hosts)))] * sum(len(host) for host in hosts if len(host) > 1)


def test_workers_of_a_host_that_average_different_places_are_told() -> None:
    hosts: Hosts = ((0, 1), (2, 3))
    regions = Regions(hosts, 200)

    async def at_odds(me: Any, array: Any) -> None:
        me.shared = regions.seen_by(me)
        await ByHost().average(me, regions.of[me.rank][me.rank : me.rank + 100])

    with pytest.raises(ProtocolError, match="worker 0 adds up a different array than worker 1; call the collectives"):
        over(hosts, at_odds, arrays(4, 100))
