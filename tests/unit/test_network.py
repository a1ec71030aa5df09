import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flockstep.messages import Address, server
from flockstep.nodes import Cluster
from flockstep.simulation.network import Fabric, Hop, Ideal, Link, Network, Switch, Transit, TwoTier, gaps
from flockstep.simulation.queue import EventQueue

Send = tuple[float, Address, Address, int]
B = 1e6
SERVER = server(0)
CLUSTER = Cluster(5, 2)


def deliveries(
    fabric: Fabric, sends: list[Send], reserved: Callable[[Hop, Transit], None] | None = None
) -> list[tuple[float, int]]:
    """Time and number of each message in order of delivery, the hops taken in order of arrival, as a driver does it."""
    queue: EventQueue[tuple[int, Transit | None]] = EventQueue()
    delivered = []
    for number, send in enumerate(sends):
        queue.schedule(send[0], (number, None))
    while queue:
        now, (number, transit) = queue.pop()
        if transit is None:
            transit = fabric.depart(sends[number][1], sends[number][2], sends[number][3], now)
        elif transit.done:
            delivered.append((now, number))
            continue
        else:
            fabric.advance(transit)
        if reserved and transit.hops:
            reserved(transit.hops[transit.hop - 1], transit)
        queue.schedule(transit.time, (number, transit))
    return delivered


def drive(fabric: Fabric, sends: list[Send], reserved: Callable[[Hop, Transit], None] | None = None) -> list[float]:
    """Delivery time of each message."""
    delivered = {number: time for time, number in deliveries(fabric, sends, reserved)}
    return [delivered[number] for number in range(len(sends))]


def overtaken(sends: list[Send], delivered: list[tuple[float, int]]) -> bool:
    """Whether a message came before an earlier one of the same pair."""
    last: dict[tuple[Address, Address], int] = {}
    for _, number in delivered:
        pair = sends[number][1], sends[number][2]
        if number < last.get(pair, -1):
            return True
        last[pair] = number
    return False


def all_at_once(fabric: Fabric, sends: list[Send]) -> list[float]:
    """Wrong driver: reserves the whole path at departure."""
    deliveries = []
    for t, source, to, nbytes in sends:
        transit = fabric.depart(source, to, nbytes, t)
        while not transit.done:
            fabric.advance(transit)
        deliveries.append(transit.time)
    return deliveries


def exactly(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def test_ideal_takes_no_time() -> None:
    assert drive(Ideal().start(CLUSTER), [(1.5, 0, 1, 10**9), (1.5, 0, SERVER, 10**9)]) == [1.5, 1.5]


@pytest.mark.parametrize(
    ("network", "latency", "slowest"),
    [
        (Link(B, 0.01), 0.01, B),
        (Link("8mbit", "10ms"), 0.01, 1e6),
        (Switch(B, 0.01, 10 * B), 0.01, B),
        (Switch(B, 0.01, B / 10), 0.01, B / 10),
        (TwoTier(2, B, 0.01, B / 10, 0.5), 0.51, B / 10),
        (TwoTier(2, B, 0.01, 10 * B, 0.5), 0.51, B),
        (TwoTier(4, B, 0.01, B / 10, 0.5), 0.01, B),
    ],
    ids=str,
)
@pytest.mark.parametrize("nbytes", [0, 1, 1_000_000])
def test_an_uncontended_message_takes_latency_plus_its_bytes_once(
    network: Network, latency: float, slowest: float, nbytes: int
) -> None:
    (arrival,) = drive(network.start(CLUSTER), [(2.0, 0, 3, nbytes)])
    assert arrival == exactly(2.0 + latency + nbytes / slowest)


def test_what_a_node_sends_itself_takes_no_time() -> None:
    for network in (Link(B, 1.0), Switch(B, 1.0, B), TwoTier(2, B, 1.0, B, 1.0)):
        assert drive(network.start(CLUSTER), [(1.0, 2, 2, 500)]) == [1.0]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_pushing_to_one_server_is_serialized_at_its_ingress(n: int) -> None:
    fabric = Link(B).start(Cluster(n, 1))
    arrivals = drive(fabric, [(0.0, rank, SERVER, 1000) for rank in range(n)])
    assert arrivals == [exactly((rank + 1) * 1000 / B) for rank in range(n)]


@pytest.mark.parametrize("pairs", [1, 2, 5])
@pytest.mark.parametrize("times", [0.5, 1, 2, 5, 8])
def test_a_backbone_is_shared(pairs: int, times: float) -> None:
    sends: list[Send] = [(0.0, 2 * pair, 2 * pair + 1, 1000) for pair in range(pairs)]
    last = max(drive(Switch(B, 0.0, times * B).start(Cluster(10)), sends))
    assert last == exactly(max(1.0, pairs / times) * 1000 / B)
    assert max(drive(Link(B).start(Cluster(10)), sends)) == exactly(1000 / B)


def test_two_tiers_share_the_uplink_and_the_downlink_but_nothing_inside() -> None:
    network = TwoTier(2, B, 0.0, B, 0.0)
    assert max(drive(network.start(CLUSTER), [(0.0, 0, 2, 1000), (0.0, 1, 4, 1000)])) == exactly(2000 / B)
    assert max(drive(network.start(CLUSTER), [(0.0, 0, 2, 1000), (0.0, 4, 3, 1000)])) == exactly(2000 / B)
    assert max(drive(network.start(CLUSTER), [(0.0, 0, 1, 1000), (0.0, 2, 3, 1000)])) == exactly(1000 / B)
    assert max(drive(network.start(CLUSTER), [(0.0, 0, 2, 1000), (0.0, 2, 0, 1000)])) == exactly(1000 / B)


def test_servers_are_dealt_out_over_the_groups() -> None:
    network = TwoTier(2, B, 0.0, B, 0.0)
    assert network.groups(Cluster(5, 4)) == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, -1: 0, -2: 1, -3: 2, -4: 0}
    assert drive(TwoTier(2, B, 0.0, B, 3.0).start(CLUSTER), [(0.0, 3, server(1), 0)]) == [0.0]
    assert drive(TwoTier(2, B, 0.0, B, 3.0).start(CLUSTER), [(0.0, 3, server(0), 0)]) == [3.0]


def test_a_fast_hop_behind_a_slow_one_stays_free_for_others() -> None:
    sends: list[Send] = [(0.0, 2, 0, 1000), (0.0001, 1, 0, 1000)]
    arrivals = drive(TwoTier(2, B, 0.0, B / 10, 0.0).start(CLUSTER), sends)
    assert arrivals == [exactly(10 * 1000 / B), exactly(0.0001 + 1000 / B)]


def test_hops_are_taken_in_order_of_arrival() -> None:
    big: Send = (0.0, 0, 1, 10_000)
    sends = [big, (0.0, 0, 2, 1000), (0.001, 3, 2, 1000)]
    behind, free = 11_000 / B, 0.001 + 1000 / B
    assert drive(Link(B).start(CLUSTER), sends)[1:] == [exactly(behind), exactly(free)]
    assert all_at_once(Link(B).start(CLUSTER), sends)[2] == exactly(behind + 1000 / B)


def test_a_message_queued_at_its_sender_does_not_reserve_what_is_behind() -> None:
    sends: list[Send] = [(0.0, 0, 1, 1000), (0.0, 0, 2, 1000), (0.0005, 3, 4, 1000)]
    arrivals = drive(Switch(B, 0.0, B / 2).start(CLUSTER), sends)
    assert arrivals == [exactly(2000 / B), exactly(6000 / B), exactly(4000 / B)]


class Forgetful(Fabric):
    """Wrong hop: forgets when the last message passed."""

    def advance(self, transit: Transit) -> None:
        transit.hops[transit.hop].passed = 0.0
        super().advance(transit)


def test_a_long_message_never_passes_a_short_one_in_a_crowded_backbone() -> None:
    crowd: list[Send] = [(0.0, rank, rank, 10_000) for rank in (2, 3, 4)]
    sends = [(t, a, SERVER, size) for t, a, _, size in crowd] + [(0.0, 0, 1, 1), (0.0, 0, 1, 10_000)]
    network = Switch(B, 0.0, 2 * B)
    assert not overtaken(sends, deliveries(network.start(CLUSTER), sends))
    assert overtaken(sends, deliveries(Forgetful(network.start(CLUSTER)._route), sends))


@dataclass(frozen=True)
class Chain(Network):
    """Cards of different speed in each direction, and any number of shared hops between them."""

    bandwidths: tuple[float, ...]
    latency: float

    def start(self, cluster: Cluster) -> Fabric:
        egress = {a: Hop("egress", self.bandwidths[0]) for a in cluster.addresses}
        ingress = {a: Hop("ingress", self.bandwidths[-1]) for a in cluster.addresses}
        shared = tuple(Hop("shared", bandwidth) for bandwidth in self.bandwidths[1:-1])
        between = gaps(self.bandwidths, [self.latency] * (len(self.bandwidths) - 1))
        return Fabric(lambda source, to: ((egress[source], *shared, ingress[to]), between))


chains = st.builds(
    Chain,
    st.lists(st.sampled_from([100.0, 300.0, 1e3, 7e3]), min_size=2, max_size=5).map(tuple),
    st.sampled_from([0.0, 0.1]),
)


@given(chains, st.integers(0, 5000), st.floats(0, 100))
def test_any_path_is_crossed_at_its_smallest_bandwidth(chain: Chain, nbytes: int, t: float) -> None:
    (arrival,) = drive(chain.start(CLUSTER), [(t, 0, 1, nbytes)])
    assert arrival == exactly(t + chain.latency * (len(chain.bandwidths) - 1) + nbytes / min(chain.bandwidths))


messages = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 3),
        st.sampled_from(CLUSTER.addresses),
        st.sampled_from(CLUSTER.addresses),
        st.sampled_from([0, 1, 64, 1000]) | st.integers(0, 5000),
    ),
    max_size=40,
).map(lambda sends: sorted(sends, key=lambda send: send[0]))
networks = st.one_of(
    chains,
    st.builds(Link, st.sampled_from([700.0, 1e3]), st.sampled_from([0.0, 0.1])),
    st.builds(Switch, st.just(1e3), st.sampled_from([0.0, 0.1]), st.sampled_from([300.0, 1e3, 1e4])),
    st.builds(
        TwoTier,
        st.integers(1, 5),
        st.sampled_from([300.0, 1e3]),
        st.sampled_from([0.0, 0.1]),
        st.sampled_from([170.0, 1e3, 7e3]),
        st.sampled_from([0.0, 0.7]),
    ),
)


@given(networks, messages)
def test_messages_of_a_pair_never_overtake(network: Network, sends: list[Send]) -> None:
    delivered = deliveries(network.start(CLUSTER), sends)
    assert sorted(number for _, number in delivered) == list(range(len(sends)))
    assert not overtaken(sends, delivered)


@given(networks, messages)
@settings(deadline=None)
def test_no_hop_carries_more_than_its_bandwidth(network: Network, sends: list[Send]) -> None:
    finishes: dict[Hop, list[tuple[float, int]]] = defaultdict(list)
    arrivals = drive(
        network.start(CLUSTER), sends, lambda hop, transit: finishes[hop].append((hop.free, transit.nbytes))
    )
    for hop, carried in finishes.items():
        for (before, _), (finish, nbytes) in itertools.pairwise(carried):
            assert finish - before >= nbytes / hop.bandwidth - 1e-9
        assert carried[0][0] >= carried[0][1] / hop.bandwidth - 1e-9
    assert sum(map(len, finishes.values())) == sum(_hops(network, source, to) for _, source, to, _ in sends)
    for (t, *_), arrival in zip(sends, arrivals, strict=True):
        assert arrival >= t


def _hops(network: Network, source: Address, to: Address) -> int:
    return len(network.start(CLUSTER).depart(source, to, 1, 0.0).hops)


@given(networks, messages)
@settings(deadline=None)
def test_other_messages_only_ever_delay(network: Network, sends: list[Send]) -> None:
    for send, arrival in zip(sends, drive(network.start(CLUSTER), sends), strict=True):
        (alone,) = drive(network.start(CLUSTER), [send])
        assert arrival >= alone - 1e-9


def test_aliases_have_the_bandwidth_they_say() -> None:
    (arrival,) = drive(Network.parse("100mbit").start(CLUSTER), [(0.0, 0, 1, 12_500_000)])
    assert arrival == exactly(1.0005)
