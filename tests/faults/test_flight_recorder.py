"""What the processes of a run last did is in its folder after a fault, and only then."""

from __future__ import annotations

import signal
import sys
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from flockstep.cli.app import run as run_command
from flockstep.records.events import LostEvent
from flockstep.records.flight import KEPT, FlightEvent, FlightRecorder, last_heard, read_flight
from flockstep.records.folder import RunFolder
from flockstep.report.html import write_report
from support.jobs import go_on, paced
from support.processes import RealRun

WORDS = ["train", "softmax", "-s", "all_reduce", "-n", "2", "--steps", "30"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills processes by their names in /proc")


def test_the_recorders_of_the_others_tell_what_a_killed_worker_did_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", paced(tmp_path, slow_after=60), "-s", "asgd", "-n", "3", "--steps", "200"]
    run = RealRun(words, tmp_path / "run")
    run.wait_for_work(50)
    run.fault(signal.SIGKILL, "worker-2")
    go_on(tmp_path)
    assert run.end().code == 0, run.err
    record = RunFolder(tmp_path / "run").read()
    flights, (lost,) = record.flight, record.summary.lost
    assert set(flights) == {"launcher", "server 0", "worker 0", "worker 1"}, "a killed process has no recorder"
    assert all(one.seconds <= other.seconds for events in flights.values() for one, other in pairwise(events))
    from_two = [one for one in flights["server 0"] if one.kind == "receive" and one.peer == 2]
    steps = [one.step for one in record.events if getattr(one, "rank", None) == 2 and one.seconds < lost.seconds]
    assert len(from_two) >= max(steps) - 1, "each of its pushes was heard"
    assert {one.tag for one in from_two} == {"push"}
    assert run_command(["flight", str(tmp_path / "run")]) == 0
    out = capfd.readouterr().out
    sentence = last_heard(flights, lost)[0]
    assert sentence in out
    assert sentence.startswith(
        ("server 0 received the last message of worker 2, 'push'", "launcher received the last message")
    )
    assert run_command(["flight", "--json", str(tmp_path / "run")]) == 0
    assert len(msgspec.json.decode(capfd.readouterr().out)["flight"]["server 0"]) == len(flights["server 0"])
    report = write_report([record], tmp_path / "report.html")
    assert sentence.replace("'", "&#39;") in report.read_text()


@pytest.mark.full
def test_a_run_without_a_fault_writes_no_recorder(tmp_path: Path) -> None:
    assert RealRun(WORDS, tmp_path / "quiet").end().code == 0
    assert not (tmp_path / "quiet" / "flight").exists()


def test_a_failure_writes_all_recorders_and_a_refused_gradient_one(tmp_path: Path) -> None:
    fault = ["--fault", "miscomputes(1, begin=20)"]
    assert RealRun([*WORDS, *fault], tmp_path / "fails").end().code == 1
    flights = read_flight(tmp_path / "fails")
    assert set(flights) == {"launcher", "worker 0", "worker 1"}
    assert flights["worker 1"][-1].step == 20
    skips = [*WORDS, *fault, "--on-bad-gradient", "skip"]
    assert RealRun(skips, tmp_path / "skips").end().code == 0
    assert set(read_flight(tmp_path / "skips")) == {"worker 1"}, "the one that refused its gradient"


def test_a_recorder_keeps_the_last_events() -> None:
    now = iter(range(10_000))
    recorder = FlightRecorder(lambda: float(next(now)))
    for step in range(KEPT + 5):
        recorder.note("send", 1, "push", step, 8)
    found = recorder.taken(lambda seconds: seconds / 2)
    assert [one.step for one in found] == list(range(5, KEPT + 5))
    assert found[0] == FlightEvent(2.5, "send", 1, "push", 5, 8)
    assert recorder.taken() == []


def test_who_waited_for_a_lost_node_is_told_with_the_delay() -> None:
    flights = {
        "worker 0": [
            FlightEvent(1.0, "receive", 3, "push", 415, 8),
            FlightEvent(2.0, "wait", 3, "'push.ack' from worker 3", 417),
            FlightEvent(20.0, "step", None, "", 418),
        ],
        "worker 1": [FlightEvent(3.0, "wait", 2, "'push.ack' from worker 2", 417)],
    }
    assert last_heard(flights, LostEvent(14.4, 3, "worker 3 was killed")) == [
        (
            "worker 0 received the last message of worker 3, 'push', at its own step 415, 13.40 s before worker 3 was "
            "declared lost"
        ),
        "worker 0 waited for 'push.ack' from worker 3 at step 417, for 12.40 s",
    ]
