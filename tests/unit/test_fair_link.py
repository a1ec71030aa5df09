"""Links that messages share as TCP connections do."""

from __future__ import annotations

import pytest

from flockstep.messages import HEADER_BYTES, Address, server
from flockstep.nodes import Cluster
from flockstep.planning.job_profile import JobProfile
from flockstep.planning.rehearsal import Conditions, rehearse
from flockstep.simulation.compute import ConstantTime
from flockstep.simulation.fair import FairLink
from flockstep.simulation.network import Fabric, Link, Network, Transit
from flockstep.simulation.queue import EventQueue
from flockstep.strategies.base import Strategy

EQUAL = FairLink(1000.0, 0.5, spread=0.0, backlog=0.0)
"""1,000 bytes per second, without a queue in the card."""
QUEUED = FairLink(1e5, spread=0.0, backlog=400.0)
"""100 bytes per millisecond, of which 4 milliseconds of a message wait in the card's queue."""
Sent = tuple[float, Address, Address, int]


def arrivals(network: Network, *sent: Sent, fabric: Fabric | None = None) -> list[float]:
    """When each message arrives that leaves at a time, from a node, for a node, with so many bytes."""
    fabric = fabric or network.start(Cluster(4, 1))
    queue: EventQueue[int | Transit] = EventQueue()
    which: dict[int, int] = {}
    found = [0.0] * len(sent)
    for index, (t, *_) in enumerate(sent):
        queue.schedule(t, index)
    while queue:
        t, event = queue.pop()
        if isinstance(event, int):
            _, source, to, nbytes = sent[event]
            transit = fabric.depart(source, to, nbytes, t)
            which[id(transit)] = event
            queue.schedule(transit.time, transit)
        elif event.done:
            found[which[id(event)]] = t
        else:
            fabric.advance(event)
            queue.schedule(event.time, event)
    return found


def about(*times: float) -> object:
    return pytest.approx(list(times), rel=3e-3)


def test_a_message_alone_takes_what_it_takes_on_a_link() -> None:
    sent = (0.0, 0, 1, 2000)
    assert arrivals(EQUAL, sent) == about(2.5) == arrivals(Link(1000.0, 0.5), sent)


def test_what_leaves_at_once_goes_on_together_where_a_link_takes_turns() -> None:
    sent = (0.0, 0, 1, 1000), (0.0, 0, 2, 1000)
    assert arrivals(EQUAL, *sent) == about(2.5, 2.5)
    assert arrivals(Link(1000.0, 0.5), *sent) == about(1.5, 2.5)


def test_a_short_message_passes_a_long_one_and_the_long_one_has_the_rest() -> None:
    assert arrivals(EQUAL, (0.0, 0, 1, 3000), (1.0, 0, 2, 500)) == about(4.0, 2.5)


def test_what_arrives_queues_in_the_order_of_its_bytes() -> None:
    assert arrivals(EQUAL, *((0.0, rank, server(0), 1000) for rank in range(4))) == about(*[4.5] * 4)
    assert arrivals(EQUAL, (0.0, 0, 3, 1000), (1.0, 1, 3, 1000), (1.0, 2, 3, 1000)) == about(1.5, 3.5, 3.5)


def test_messages_between_the_same_two_keep_their_order() -> None:
    assert arrivals(EQUAL, (0.0, 0, 1, 2000), (0.0, 0, 1, 10), (0.0, 1, 0, 1000)) == about(2.5, 2.51, 1.5)


def test_a_node_sends_itself_at_once() -> None:
    assert arrivals(EQUAL, (1.0, 2, 2, 1000)) == [1.0]


def test_uneven_shares_leave_what_passes_in_all_as_it_is() -> None:
    first, second = sorted(arrivals(FairLink(1000.0, 0.5, spread=1.0), (0.0, 0, 1, 1000), (0.0, 0, 2, 1000)))
    assert first < 2.45
    assert second == pytest.approx(2.5, rel=3e-3)


def test_infinite_bandwidth_leaves_the_latency() -> None:
    assert arrivals(FairLink(float("inf"), 0.5), (0.0, 0, 1, 1000), (0.0, 0, 2, 1000)) == about(0.5, 0.5)


def test_a_narrow_link_is_slower_for_what_leaves_and_what_arrives() -> None:
    fabric = EQUAL.start(Cluster(4, 1))
    fabric.narrow(0, [1, 2, 3], 2.0)
    sent = (0.0, 0, 1, 1000), (0.0, 2, 0, 1000), (0.0, 2, 3, 1000)
    assert arrivals(EQUAL, *sent, fabric=fabric)[0] == pytest.approx(2.5, rel=3e-3)


def test_times_are_exact_to_a_thousandth_whenever_the_run_began() -> None:
    assert arrivals(EQUAL, (1e9, 0, 1, 1), (1e9, 0, 2, 1))[0] > 1e9


def test_the_end_of_a_message_that_waits_in_the_cards_queue_leaves_before_a_later_message() -> None:
    """With at most 400 bytes left the first message is not delayed; with 1,000 it shares the card for 600."""
    assert arrivals(QUEUED, (0.0, 0, 1, 1000), (0.007, 0, 2, 1000)) == about(0.01, 0.02)
    assert arrivals(QUEUED, (0.0, 0, 1, 2000), (0.01, 0, 2, 2000)) == about(0.026, 0.04)


def test_messages_sent_at_once_have_nothing_in_the_cards_queue_yet() -> None:
    assert arrivals(QUEUED, *((0.0, 0, to, 1000) for to in (1, 2, 3))) == about(0.03, 0.03, 0.03)
    assert arrivals(QUEUED, (0.0, 0, 1, 1000), (0.001, 0, 2, 1000)) == about(0.018, 0.02)


def test_the_queue_of_a_slow_card_holds_ten_milliseconds() -> None:
    slow = FairLink(1000.0, spread=0.0)
    assert arrivals(slow, (0.0, 0, 1, 1000), (0.5, 0, 2, 1000)) == about(1.5 - 0.01, 2.0)


def test_a_queue_changes_nothing_between_two_nodes_or_at_the_receiver() -> None:
    sent = (0.0, 0, 3, 1000), (0.005, 1, 3, 1000), (0.006, 0, 3, 500)
    assert arrivals(QUEUED, *sent) == about(*arrivals(FairLink(1e5, spread=0.0, backlog=0.0), *sent))


def step(strategy: str, network: Network) -> float:
    at = Conditions(ConstantTime(1e-6), network)
    return rehearse(JobProfile("job", 250_000), Strategy.parse(strategy), 4, at, steps=20).seconds_per_step


def test_a_barrier_at_a_server_costs_both_ways_where_a_link_overlaps_them() -> None:
    transit = (1e6 + HEADER_BYTES) / 1e7
    assert step("ps", FairLink(1e7, spread=0.0, backlog=0.0)) == pytest.approx(8 * transit, rel=0.01)
    assert step("ps", Link(1e7)) < 0.8 * 8 * transit


def test_a_ring_takes_what_it_takes_on_a_link() -> None:
    assert step("all_reduce", FairLink(1e7)) == pytest.approx(step("all_reduce", Link(1e7)), rel=0.01)
