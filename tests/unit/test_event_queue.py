import pytest
from hypothesis import given
from hypothesis import strategies as st

from flockstep.errors import RunError
from flockstep.simulation.queue import EventQueue


def drained(queue: EventQueue[int]) -> list[tuple[float, int]]:
    return [queue.pop() for _ in range(len(queue))]


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0])))
def test_order_is_time_then_order_of_scheduling(times: list[float]) -> None:
    queue: EventQueue[int] = EventQueue()
    for number, time in enumerate(times):
        queue.schedule(time, number)
    assert drained(queue) == sorted((time, number) for number, time in enumerate(times))


def test_only_taking_an_event_moves_the_clock() -> None:
    queue: EventQueue[str] = EventQueue(start=1.0)
    queue.schedule(3.0, "b")
    queue.schedule(2.0, "a")
    assert queue.now == 1.0
    assert queue.pop() == (2.0, "a")
    assert queue.now == 2.0
    queue.schedule(2.0, "still now")
    assert queue.pop() == (2.0, "still now")


@pytest.mark.parametrize("time", [1.9, float("nan"), float("inf"), float("-inf")])
def test_the_past_and_what_is_no_time_are_refused(time: float) -> None:
    queue: EventQueue[str] = EventQueue(start=2.0)
    with pytest.raises(RunError, match=r"finite and >= the current time \(2.0\)"):
        queue.schedule(time, "late")
    assert len(queue) == 0
