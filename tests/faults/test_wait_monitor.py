"""Whom a run waits for: said again and again, and ended at a limit; and why a supervisor was stopped."""

from __future__ import annotations

import errno
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from flockstep.errors import RunError
from flockstep.launchers.comparisons import Comparisons
from flockstep.launchers.wait_monitor import JOINS_JOB, JOINS_SCRIPT, WaitMonitor
from flockstep.messages import Message
from support.matrix import few
from support.processes import MEMORY, PATIENCE, RealRun, wait_until


class Monitored:
    """A wait monitor whose clock the test sets."""

    def __init__(self, workers: int = 3, limit: float | None = None, joins: str = JOINS_SCRIPT):
        self.time, self.lines = 0.0, list[str]()
        self.waits = WaitMonitor(workers, limit, self.lines.append, 10.0, lambda: self.time, joins)
        self.joined, self.ended = set(range(workers)), set[int]()

    def until(
        self, time: float, *waiting: int, moving: tuple[int, ...] = (), calls: Mapping[int, str] = MappingProxyType({})
    ) -> list[str]:
        """Second by second; some say that they wait, some take steps. Returns what was said. `calls`: rank → the call
        that every rank must make in which the rank waits.
        """
        before = len(self.lines)
        while self.time < time:
            self.time += 1.0
            for rank in waiting:
                what = f"'reduce' from worker {rank - 1}"
                self.waits.hear(rank, {"step": 8, "for": what, "together": calls.get(rank, "")})
            for rank in moving:
                self.waits.hear(rank, {"step": int(self.time)})
            self.waits.look(self.joined, self.ended)
        return self.lines[before:]


def test_who_hangs_is_named_every_ten_seconds_with_what_the_others_wait_for() -> None:
    monitored = Monitored()
    for rank in range(3):
        monitored.waits.hear(rank, {"step": 7})
    assert monitored.until(9, 0, 2) == []
    said = monitored.until(35, 0, 2)
    assert len(said) == 3
    assert said[0] == (
        "waiting for worker 1 (after step 7): no step for 10 s; worker 0 at step 8 waits for 'reduce' from worker -1; "
        "worker 2 at step 8 waits for 'reduce' from worker 1; add --step-timeout SECONDS to end such a run"
    )
    assert "no step for 30 s" in said[2]


def test_what_a_worker_does_before_it_joins_is_said_in_the_words_of_its_run() -> None:
    for joins, expected in ((JOINS_SCRIPT, "before flockstep.distribute"), (JOINS_JOB, "the job's model and data")):
        monitored = Monitored(joins=joins)
        monitored.joined.remove(1)
        said = monitored.until(100, 0)
        assert said
        assert expected in said[-1]


def test_long_steps_for_which_nobody_waits_are_no_news() -> None:
    monitored = Monitored()
    assert monitored.until(25) == []
    monitored.waits.hear(0, {"step": 1})
    assert monitored.until(60, moving=(0, 2)) == []
    monitored.ended.add(0)
    assert monitored.until(61, moving=(2,)) == [
        "waiting for worker 1 (after step 0): no step for 61 s; add --step-timeout SECONDS to end such a run"
    ]


def test_who_has_not_joined_is_named() -> None:
    monitored = Monitored()
    monitored.joined = {0, 2}
    assert monitored.until(59, moving=(0, 2)) == []
    assert monitored.until(199, moving=(0, 2)) == [
        f"worker 1 has not joined the run after {seconds} s: it is still running the part of the "
        "script before flockstep.distribute or flockstep.join; add --step-timeout SECONDS to end such a run"
        for seconds in (60, 80, 120)
    ]


def test_a_long_wait_is_told_of_less_and_less_often_until_it_ends() -> None:
    """The clock of the second wait begins at 2000 s."""
    monitored = Monitored()
    monitored.until(8, moving=(0, 1, 2))
    seconds = [int(re.search(r"no step for (\d+) s", one)[1]) for one in monitored.until(2000, 0, 2)]  # type: ignore[index]
    assert seconds == [10, 20, 30, 40, 50, 60, 80, 120, 200, 360, 680, 1280, 1880]
    monitored.until(2001, moving=(0, 1, 2))
    assert len(monitored.until(2042, 0, 2)) == 4


def test_that_nobody_has_joined_is_said_after_a_minute() -> None:
    monitored = Monitored()
    monitored.joined = set()
    assert monitored.until(59) == []
    (said,) = monitored.until(61)
    assert said.startswith("worker 0, worker 1 and worker 2 have not joined the run after 60 s: they are still")


def test_a_deadlock_names_everyone() -> None:
    assert Monitored(2).until(10, 0, 1)[0].startswith("every worker has waited for 10 s: worker 0 at step 8 waits for")


def test_a_call_that_the_others_do_not_make_ends_the_run_in_a_minute() -> None:
    """Of nine workers the last one makes the call; four are shown, one of each kind."""
    monitored, alone = Monitored(9), {8: "consensus"}
    said = monitored.until(59, *range(9), calls=alone)
    assert said[0].endswith("; the run ends after 60 s of this")
    with pytest.raises(
        RunError, match=r"every worker .* 60 s: worker 0 .*; worker 8 .*; call consensus\(\) on every rank"
    ):
        monitored.until(60, *range(9), calls=alone)
    monitored = Monitored(2)
    monitored.ended = {1}
    with pytest.raises(RunError, match=r"; worker 1 took its last step; call sync\(\) on every rank, or on none"):
        monitored.until(60, 0, calls={0: "sync"})


@pytest.mark.parametrize(
    ("calls", "limit"),
    [({}, None), ({0: "sync", 1: "sync"}, None), ({0: "finish"}, None), ({0: "sync"}, 300.0)],
    ids=["steps", "one call", "finish", "a limit of the user"],
)
def test_a_wait_that_may_end_does_not_end_the_run(calls: dict[int, str], limit: float | None) -> None:
    said = Monitored(2, limit=limit).until(250, 0, 1, calls=calls)
    assert all(line.endswith("; add --step-timeout SECONDS to end such a run") for line in said)
    assert said


def test_the_others_make_the_call_later() -> None:
    """Worker 1 takes a long step and waits in between: the run goes on."""
    monitored = Monitored(2)
    monitored.until(50, 0, 1, calls={0: "sync"})
    monitored.until(51, 0, moving=(1,), calls={0: "sync"})
    monitored.until(100, 0, 1, calls={0: "sync", 1: "sync"})  # raises if it counts as a deadlock
    assert monitored.time == 100


def test_a_worker_that_waits_for_slow_ones_is_no_deadlock_while_they_take_steps() -> None:
    """Worker 0 answers requests after its last step; the others wait for it, and step every eight seconds."""
    monitored = Monitored(limit=9.0)
    for now in range(8, 80, 8):
        assert monitored.until(now, 0, 1, 2) == []
        monitored.until(now, 0, moving=(1, 2))
        for rank in (1, 2):
            monitored.waits.hear(rank, {"step": now})
    with pytest.raises(RunError, match=r"every worker has waited for 9 s: worker 0 at step 8 waits .*; worker 1"):
        monitored.until(100, 0, 1, 2)


def test_a_worker_that_has_waited_and_now_computes_has_its_time_from_then_on() -> None:
    """First it waits for 15 s, then it computes: the others wait for it, and it is not said to wait."""
    monitored = Monitored(limit=20.0)
    monitored.until(7, 0, moving=(1, 2))
    monitored.until(15, 0, 1, 2)
    assert monitored.until(34, 1, 2)[-1].startswith(
        "waiting for worker 0 (after step 8): no step for 12 s; worker 1 at"
    )
    with pytest.raises(RunError, match=r"^waiting for worker 0 \(after step 8\): no step for 20 s"):
        monitored.until(60, 1, 2)


def test_a_limit_ends_the_run() -> None:
    monitored = Monitored(limit=4.0)
    assert monitored.until(3, 0, 2) == []
    said = r"waiting for worker 1 \(after step 0\): no step for 4 s; .*exceeds --step-timeout 4: fix the cause"
    with pytest.raises(RunError, match=said):
        monitored.until(4, 0, 2)
    monitored = Monitored(limit=4.0)
    assert monitored.until(40, moving=(0, 1, 2)) == []


def test_a_limit_on_steps_is_none_for_workers_that_take_none() -> None:
    """Those that only move arrays tell of no step, however much they do; joining has its limit there too."""
    monitored = Monitored(limit=4.0)
    monitored.waits.begin(stepping=False)
    assert monitored.until(40) == []
    monitored.joined = {0, 2}
    with pytest.raises(RunError, match=r"worker 1 has not joined .*exceeds --step-timeout 4"):
        monitored.until(45)


@pytest.mark.parametrize("broken", [True, False])
def test_a_warning_that_nobody_can_read_does_not_end_a_run(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full() if broken else None)
    draws = Comparisons(2, lambda: None)
    for rank in range(2):
        draws.hear(Message(rank, "gradient", note={"step": 1, "gradient": "abc"}))
    assert draws._said == {"gradient"}


@pytest.mark.parametrize(
    ("sharded", "way"),
    [(False, "seed the random order of the data"), (True, "give flockstep.shard at least as many different samples")],
)
def test_workers_that_shard_too_few_samples_are_not_sent_to_shard(
    sharded: bool, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = Comparisons(2, lambda: None)
    for rank in range(2):
        if sharded:
            note = {"of": "data", "digest": "d", "certain": 1, "step": 0}
            draws.hear(Message(rank, "data", note=note))
        draws.hear(Message(rank, "gradient", note={"step": 1, "gradient": "abc"}))
    assert f"so they draw the same batches; {way}" in capsys.readouterr().err


ENDLESS = ["-n", "3", "--steps", "1000000", "--evaluate-every", "10", "--heartbeat", "3600"]
OFTEN = """
import functools
from flockstep.launchers import supervisor
supervisor.WaitMonitor = functools.partial(supervisor.WaitMonitor, period=2.0)
"""
STRICT = """
import functools
from flockstep.launchers import supervisor, wait_monitor
class Strict(wait_monitor.WaitMonitor):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self._given = self._limit
    def look(self, joined, ended, lost):
        self._limit = self._given if {when} else None
        super().look(joined, ended, lost)
supervisor.WaitMonitor = functools.partial(Strict, period=2.0)
"""
"""The limit holds from the fault on: until then a busy machine may take longer."""


@pytest.mark.parametrize("strategy", few(["all_reduce", "dpsgd(ring)"], "all_reduce"))
def test_a_worker_that_hangs_is_named_and_ends_the_run_in_time(strategy: str, tmp_path: Path) -> None:
    arguments = ["train", "quadratic", "-s", strategy, *ENDLESS, "--step-timeout", "4", *MEMORY]
    run = RealRun(arguments, tmp_path / "run", before=STRICT.format(when="{*self._waiting} == {0, 2}"))
    run.wait_for_work()
    run.fault(signal.SIGSTOP, "worker-1")
    ended = run.end()
    assert ended.code == 1
    assert re.search(r"waiting for worker 1 \(after step \d+\): no step for \d+ s; worker [02] at step", ended.err)
    assert "exceeds --step-timeout 4" in ended.err
    assert ended.summary is not None
    assert ended.summary["status"] == "failed"
    assert "worker 1" in ended.summary["error"]


@pytest.mark.full
def test_a_worker_that_hangs_is_spoken_of_while_the_run_waits(tmp_path: Path) -> None:
    run = RealRun(["train", "quadratic", "-s", "all_reduce", *ENDLESS], tmp_path / "run", before=OFTEN)
    run.wait_for_work()
    run.fault(signal.SIGSTOP, "worker-2")
    wait_until(lambda: "waiting for worker 2 (after step" in run.err, PATIENCE, "the sentence")
    run.fault(signal.SIGCONT, "worker-2")
    before = run.steps(0)
    wait_until(lambda: run.steps(0) > before + 10, PATIENCE, "work after the wait")
    run.fault(signal.SIGINT, "main")
    assert run.end().code == 130


def test_a_call_that_other_ranks_do_not_make_is_named_with_its_line(tmp_path: Path) -> None:
    """Rank 0 evaluates alone; rank 1 goes on, and waits in its next step."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, flockstep\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer = flockstep.distribute(model, optimizer, strategy='all_reduce')\n"
        "for step in range(10):\n"
        "    model(torch.ones(1, 2)).sum().backward()\n"
        "    optimizer.step()\n"
        "    if step == 3 and flockstep.rank() == 0:\n"
        "        with optimizer.consensus():\n"
        "            print('alone')\n"
        "optimizer.finish()\n"
    )
    ended = RealRun(["launch", "-n", "2", str(script)], tmp_path / "run", before=OFTEN, torch=True).end()
    assert ended.code == 1
    assert ended.err.endswith("; call consensus() on every rank, or on none\n")
    said = "waits for the other ranks in consensus() (script.py, line 9), which every rank must call"
    assert f"worker 0 at step 4 {said}" in ended.err
    assert re.search(r"worker 1 at step \d waits for .* in step\(\) \(script.py, line 7\)", ended.err)


def test_a_rank_that_never_joins_ends_the_run_in_time(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, sys\n"
        "if os.environ['RANK'] == '1':\n    signal.pause()\n"
        "import flockstep\nwith flockstep.join() as comm:\n    comm.barrier()\n"
    )
    before = STRICT.format(when="{*joined} == {0}")
    ended = RealRun(["launch", "-n", "2", "--step-timeout", "4", str(script)], tmp_path / "run", before=before).end()
    assert ended.code == 1
    assert "worker 1 has not joined the run after" in ended.err
    assert "exceeds --step-timeout 4" in ended.err


@pytest.mark.parametrize("kind", few([signal.SIGTERM, signal.SIGHUP], signal.SIGHUP))
def test_a_supervisor_that_is_told_to_stop_says_by_what(kind: signal.Signals, tmp_path: Path) -> None:
    run = RealRun(["train", "quadratic", "-s", "all_reduce", *ENDLESS], tmp_path / "run")
    run.wait_for_work()
    run.fault(kind, "main")
    ended = run.end()
    assert ended.code == 130
    assert ended.summary is not None
    assert ended.summary["status"] == "interrupted"
    assert kind.name in ended.summary["error"]
