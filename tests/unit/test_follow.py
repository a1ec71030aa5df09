"""`follow`: every event of a run once, while the run writes them."""

import os

import pytest

from flockstep.errors import ConfigurationError
from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent, StepEvent
from flockstep.records.folder import EventWriter, RunFolder
from flockstep.records.owner import OWNER
from flockstep.records.summary import summarize
from flockstep.trackers.track import follow

CONFIG = RunConfig(kind="train", job="digits", strategy="easgd", workers=2)


def step(rank: int, number: int) -> StepEvent:
    return StepEvent(number + rank / 10, rank, number, 1.0, 0.1, 0.0, 0.0, 8, 8, 1, 1)


def evaluation(seconds: float) -> EvaluationEvent:
    return EvaluationEvent(seconds, 1.0, 2, 8.0, 0.5, 0.9, None)


@pytest.fixture
def record(tmp_path):
    """A run that this process is writing."""
    record = RunFolder(tmp_path / "run")
    with record.created(CONFIG):
        yield record


def followed(record: RunFolder, *between) -> list[list]:
    """What `follow` yields if the given functions are called in its pauses, one in each."""
    calls = iter(between)
    return list(follow(record, lambda: next(calls)()))


def end(record: RunFolder) -> None:
    events = record.merge_events()
    record.write_summary(summarize(record.read_config(), events, "finished"))


def test_events_of_a_run_are_yielded_as_they_are_written_and_once(record):
    first, second = (EventWriter(record.node_events_file(rank), 1) for rank in (0, 1))

    def more() -> None:
        first.write(step(0, 2))
        second.write(step(1, 1))

    def last() -> None:
        second.write(step(1, 2))
        with EventWriter(record.node_events_file(None)) as launcher:  # a file that only the merged record shows
            launcher.write(evaluation(3.0))
        first.close()
        second.close()
        end(record)

    first.write(step(0, 1))
    assert followed(record, more, last) == [
        [step(0, 1)],
        [step(0, 2), step(1, 1)],
        [step(1, 2), evaluation(3.0)],
    ]


def test_equal_events_of_one_node_are_all_yielded(record):
    with EventWriter(record.node_events_file(0), 1) as events:
        events.write(evaluation(1.0))
        events.write(evaluation(1.0))
    assert followed(record, lambda: end(record)) == [[evaluation(1.0)] * 2, []]


def test_half_a_line_waits_for_its_end(record):
    with EventWriter(record.node_events_file(0), 1) as events:
        events.write(step(0, 1))
    file = record.node_events_file(0)
    line = file.read_bytes()
    file.write_bytes(line[:30])

    def rest() -> None:
        file.write_bytes(line)

    assert followed(record, rest, lambda: end(record)) == [[], [step(0, 1)], []]


def test_a_run_that_has_ended_is_yielded_at_once(record):
    with EventWriter(record.node_events_file(0), 1) as events:
        events.write(step(0, 1))
    end(record)
    assert followed(record) == [[step(0, 1)]]


def test_a_run_whose_process_was_killed_ends(tmp_path):
    record = RunFolder(tmp_path)
    record.write_config(CONFIG)
    (tmp_path / OWNER).write_text(f"{os.getpid()}\n")  # the number of a process may be used again
    with EventWriter(record.node_events_file(0), 1) as events:
        events.write(step(0, 1))
    assert followed(record) == [[step(0, 1)]]


def test_a_line_that_is_no_event_is_refused(record):
    record.node_events_file(0).parent.mkdir()
    record.node_events_file(0).write_text("{}\n")
    with pytest.raises(ConfigurationError, match=r"line 1 of .*worker-0.jsonl is not an event"):
        followed(record)
