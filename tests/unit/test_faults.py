"""Faults in virtual time: who dies, what is lost, who is slow, and who hears of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from flockstep.errors import ConfigurationError, PeerLost, RunError
from flockstep.messages import HEADER_BYTES
from flockstep.nodes import Worker
from flockstep.records.events import LostEvent, StepEvent
from flockstep.strategies.base import Strategy, Traits
from flockstep.testing.strategies import Sent, equal_bits, run_strategy


def steps(run, rank):
    return sum(event.rank == rank for event in run.of(StepEvent))


def test_where_everyone_is_needed_a_death_is_the_end():
    with pytest.raises(PeerLost, match=r"worker 1 died at step 3; worker 0 at step 4 waited for .* from worker"):
        run_strategy("all_reduce", 3, 20, compute="constant(1)", network="ideal", faults=["dies(1, 3.5, noticed=2)"])


def test_where_it_can_be_done_without_the_others_go_on():
    run = run_strategy("asgd", 3, 20, compute="constant(1)", network="ideal", faults=["dies(1, 3.5, noticed=2)"])
    assert [steps(run, rank) for rank in range(3)] == [20, 3, 20]
    assert [(lost.seconds, lost.node) for lost in run.of(LostEvent)] == [(5.5, 1)]
    whole = run_strategy("asgd", 3, 20, compute="constant(1)", network="ideal")
    assert not equal_bits(run.server, whole.server)
    assert whole.of(LostEvent) == []


def test_a_dead_server_is_the_end_of_those_that_need_it():
    with pytest.raises(PeerLost, match=r"server 0 died at step 0; worker 0 at step"):
        run_strategy("asgd", 2, 20, compute="constant(1)", faults=["dies(-1, 5)"])


def test_a_death_after_the_end_changes_nothing():
    plain, late = (run_strategy("gossip", 3, 10, compute="constant(1)", faults=f) for f in ([], ["dies(1, 1000)"]))
    assert equal_bits(plain.replicas, late.replicas)
    assert late.of(LostEvent) == []


def test_a_lost_message_stalls_those_that_wait_for_it():
    with pytest.raises(RunError, match=r"deadlock.*worker 1 for 'gather' from worker 0 at step 2"):
        # Two workers exchange two messages each a step: the fourth is the answer of the second step.
        run_strategy("all_reduce", 2, 10, faults=["drops(0, 1, nth=4)"])


def test_only_the_message_that_was_named_is_lost():
    run, whole = (run_strategy("broadcast", 3, 10, faults=f) for f in (["drops(0, 2, 3)"], []))
    lost = {pair: count - run.deliveries()[pair] for pair, count in whole.deliveries().items()}
    assert lost == {pair: int(pair == (2, 0)) for pair in lost}


def test_a_slow_worker_is_slow_for_the_time_given():
    run = run_strategy("gossip", 2, 6, compute="constant(1)", network="ideal", faults=["slows(1, 3, at=2, until=5)"])
    ends = {rank: [event.seconds for event in run.of(StepEvent) if event.rank == rank] for rank in range(2)}
    assert ends == {0: [1, 2, 3, 4, 5, 6], 1: [1, 2, 5, 6, 7, 8]}


@pytest.mark.parametrize(
    "fault", ["dies(3, 1)", "dies(-1, 1)", "drops(0, 5)", "drops(-2, 0)", "slows(9, 2)", "narrows(-2, 2)"]
)
def test_faults_of_nodes_that_take_no_part_are_refused(fault):
    with pytest.raises(ConfigurationError, match=r"does not exist in this run: there are 3 workers .* and 0 servers"):
        run_strategy("gossip", 3, 2, faults=[fault])


def test_a_server_is_never_slow():
    with pytest.raises(
        ConfigurationError, match="needs a worker's rank, got -1, because servers compute no gradients; use 0 to"
    ):
        run_strategy("asgd", 2, 2, faults=["slows(-1, 2)"])


@dataclass(frozen=True)
class Copes(Strategy):
    """Worker 0 waits for worker 1, and goes on alone where it does not come."""

    @property
    def traits(self) -> Traits:
        return Traits("partial", True, ("rank0",))

    async def worker(self, me: Worker) -> None:
        if me.rank == 0:
            with pytest.raises(PeerLost, match="worker 1 was lost while worker 0 waited for 'never'"):
                await me.receive("never", 1)
        while me.training:
            await me.gradient()


def test_a_program_may_deal_with_a_message_that_cannot_come():
    run = run_strategy(Copes(), 2, 4, compute="constant(1)", faults=["dies(1, 2.5)"])
    assert [steps(run, rank) for rank in range(2)] == [4, 2]


def test_a_slow_worker_holds_its_core_for_as_long_as_it_computes():
    run = run_strategy("gossip", 2, 2, compute="shared_cores(constant(1), 1)", network="ideal", faults=["slows(1, 3)"])
    ends = {rank: [event.seconds for event in run.of(StepEvent) if event.rank == rank] for rank in range(2)}
    assert ends == {0: [1, 5], 1: [4, 8]}


def test_gradients_on_shared_cores_slow_each_other_down_until_a_worker_dies():
    compute = "shared_cores(constant(1), 1, turns=True)"
    slow = run_strategy("asgd", 3, 3, compute=compute, network="ideal", faults=["slows(0, 0.5)"])
    ends = {rank: [event.seconds for event in slow.of(StepEvent) if event.rank == rank] for rank in range(3)}
    assert ends[0] == pytest.approx([1.5, 3, 4.5])  # half a gradient's work, at a third of the core
    assert ends[1] == ends[2] == pytest.approx([3, 5.5, 7.5])  # worker 0 has ended at 4.5
    run = run_strategy("asgd", 3, 3, compute=compute, network="ideal", faults=["dies(1, 1.5)"])
    ends = {rank: [event.seconds for event in run.of(StepEvent) if event.rank == rank] for rank in range(3)}
    assert ends == {0: pytest.approx([2.5, 4.5, 6.5]), 1: [], 2: pytest.approx([2.5, 4.5, 6.5])}


@pytest.mark.parametrize(
    ("fault", "ends"),
    [
        ("narrows(1, 16)", [1, 18, 35]),
        ("narrows(1, 16, at=10)", [1, 3, 5, 7, 9, 11, 28]),
        ("narrows(1, 16, at=0, until=4)", [1, 18, 20, 22]),
        ("narrows(1, 16, at=100)", [1, 3, 5]),
    ],
)
def test_a_narrow_link_takes_its_time(fault, ends):
    """Two workers exchange an array a step by recursive doubling, a second each at full bandwidth."""
    whole = run_strategy("all_reduce(recursive_doubling)", 2, 8, compute="constant(1)", network="link(1000)")
    size = next(m.message.payload_bytes for m in whole.simulation.log if isinstance(m, Sent)) + HEADER_BYTES
    network = f"link({size}, 0)"
    run = run_strategy("all_reduce(recursive_doubling)", 2, 8, compute="constant(1)", network=network, faults=[fault])
    assert [event.seconds for event in run.of(StepEvent) if event.rank == 0][: len(ends)] == pytest.approx(ends)
    assert equal_bits(run.replicas, whole.replicas)


def test_only_the_node_itself_has_a_narrow_link():
    plain, narrow = (
        run_strategy("asgd", 3, 10, compute="constant(1)", network="link('10kbit', 0)", faults=faults)
        for faults in ([], ["narrows(1, 3)"])
    )
    took = {rank: [run.totals[rank].seconds for run in (plain, narrow)] for rank in range(3)}
    assert took[1][1] > 1.3 * took[1][0]
    assert all(took[rank][1] < 1.1 * took[rank][0] for rank in (0, 2))


def test_two_faults_of_one_link_multiply():
    both, one = (
        run_strategy("all_reduce", 2, 8, compute="constant(1)", network="link('10kbit', 0)", faults=faults)
        for faults in (["narrows(1, 2)", "narrows(1, 3)"], ["narrows(1, 6)"])
    )
    assert both.seconds == one.seconds


@pytest.mark.parametrize(
    "network", ["switch('1mbit', '1ms', '10mbit')", "two_tier(2, '1mbit', 0, '100kbit', 0)", "link('1mbit')"]
)
def test_every_network_has_links_that_can_be_narrow(network):
    seconds = [
        run_strategy("all_reduce", 4, 4, compute="constant(0)", network=network, faults=faults).seconds
        for faults in ([], ["narrows(1, 100)"])
    ]
    assert seconds[1] > 2 * seconds[0]


def test_what_has_no_link_cannot_be_narrow():
    with pytest.raises(ConfigurationError, match="no link of worker 1 whose bandwidth can be reduced"):
        run_strategy("all_reduce", 2, 4, network="ideal", faults=["narrows(1, 10)"])
