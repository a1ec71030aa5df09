"""Events on their way to the supervisor: in batches, none lost, none changed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError
from flockstep.records.events import DivergedEvent, Event, StepEvent
from flockstep.runtime.reports import MOST_EVENTS, PERIOD, EventSender, events_in


class Supervisor:
    """Takes what it is told, with a clock of its own."""

    def __init__(self) -> None:
        self.time, self.batches = 0.0, list[list[Event]]()

    def tell(self, tag: str, array: FlatArray | None = None) -> None:
        assert tag == "events"
        assert array is not None
        self.batches.append(events_in(array))


def step(number: int, loss: float = 0.5) -> StepEvent:
    return StepEvent(float(number), 0, number, loss, *[0.0] * 3, *[0] * 4)


def test_steps_wait_for_a_period_and_what_is_rare_takes_them_along() -> None:
    supervisor = Supervisor()
    reports = EventSender(supervisor, lambda: supervisor.time)
    first = [step(1), step(2), DivergedEvent(0.0, 0, "a reason"), step(3)]
    for event in first:
        reports.write(event)
    assert supervisor.batches == [first[:3]]
    supervisor.time = 1.01 * PERIOD
    reports.write(step(4))
    assert supervisor.batches[1:] == [[step(3), step(4)]]
    reports.flush()
    assert len(supervisor.batches) == 2, "an empty batch was sent"


def test_a_batch_is_bounded() -> None:
    supervisor = Supervisor()
    reports = EventSender(supervisor, lambda: 0.0)
    for number in range(3 * MOST_EVENTS):
        reports.write(step(number))
    assert [len(batch) for batch in supervisor.batches] == [MOST_EVENTS] * 3
    assert [event.step for batch in supervisor.batches for event in batch if isinstance(event, StepEvent)] == [
        *range(3 * MOST_EVENTS)
    ]


def test_a_loss_that_is_not_finite_travels() -> None:
    supervisor = Supervisor()
    reports = EventSender(supervisor, lambda: 0.0)
    reports.write(step(1, math.nan))
    reports.flush()
    (sent,) = supervisor.batches[0]
    assert isinstance(sent, StepEvent)
    assert sent.loss is not None
    assert math.isnan(sent.loss)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91\x80", b"\x91" * 5000])
def test_what_is_no_batch_of_events_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        events_in(np.frombuffer(data, np.uint8))
