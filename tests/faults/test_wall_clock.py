"""The wall clock jumps during a run: timeouts, times of the record and the result are as if it had not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flockstep.records.events import StepEvent
from flockstep.records.folder import RunFolder
from support.jobs import go_on, paced
from support.processes import PATIENCE, RealRun, content, wait_until

SOURCE = Path(__file__).parents[1] / "support" / "wall_clock.c"
WATCH = """
import time
from pathlib import Path
from flockstep.records import failpoints

FILE, last = Path(__file__).with_name("jumps"), [time.time() - time.monotonic()]

def look(point):
    ahead = time.time() - time.monotonic()
    jump, last[0] = ahead - last[0], ahead
    if abs(jump) > 1000:
        name = Path("/proc/self/comm").read_text().strip()
        with FILE.open("a") as file:
            file.write(f"{name} {round(jump)}\\n")

failpoints.hooks.append(look)
"""
"""For --import: a process writes by how many seconds the wall clock has jumped."""


def until(run: RealRun, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, while the run goes on."""
    wait_until(lambda: condition() or not run.going(), PATIENCE, run.err)
    assert run.going(), run.err


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler")
def test_a_run_whose_wall_clock_jumps_ends_as_one_whose_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the launcher and of the workers is an hour ahead, and then an hour behind."""
    library, clock, jumps = tmp_path / "wall_clock.so", tmp_path / "clock", tmp_path / "jumps"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SOURCE)], check=True)
    (tmp_path / "watch.py").write_text(WATCH)
    words = ["train", paced(tmp_path, slow_after=20), "-s", "all_reduce", "-n", "2", "--steps", "200"]
    with monkeypatch.context() as changed:
        changed.setenv("LD_PRELOAD", str(library))
        changed.setenv("WALL_CLOCK", str(clock))
        limits = [
            "--checkpoint-every",
            "50",
            "--heartbeat",
            "3",
            "--step-timeout",
            "60",
            "--import",
            str(tmp_path / "watch.py"),
        ]
        run = RealRun([*words, *limits], tmp_path / "run", afresh=True)
    run.wait_for_work(10)
    for ahead, jump in ((3600, 3600), (-3600, -7200)):
        (tmp_path / "next").write_text(str(ahead))
        (tmp_path / "next").replace(clock)
        lines = [f"worker-{rank} {jump}\n".encode() for rank in (0, 1)]
        until(run, lambda lines=lines: all(line in content(jumps) for line in lines))
        steps = run.steps(1)
        until(run, lambda steps=steps: run.steps(1) > steps + 3)
    go_on(tmp_path)
    ended = run.end()
    assert (ended.code, ended.err) == (0, "")
    alone = RealRun(words, tmp_path / "alone").end()
    assert ended.summary is not None
    assert alone.summary is not None
    assert ended.summary["hashes"] == alone.summary["hashes"]
    assert 0 < ended.summary["seconds"] < 3600
    for rank in (0, 1):
        events = RunFolder(tmp_path / "run").read_events()
        times = [one.seconds for one in events if isinstance(one, StepEvent) and one.rank == rank]
        assert len(times) == 200
        assert times == sorted(times)
        assert 0 <= times[0] < times[-1] < 3600
