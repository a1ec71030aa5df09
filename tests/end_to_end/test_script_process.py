"""A script that `flockstep launch` forks finds itself in a process like one that Python started for the script."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from support.processes import PATIENCE, RealRun, alive, content, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

SEEN = """
import atexit, json, multiprocessing, os, random, signal, sys, threading
from pathlib import Path

import numpy as np

place = Path(sys.argv[1]) / os.environ["RANK"]
atexit.register(lambda: place.with_suffix(".end").touch())
seen = {
    "drawn": [random.random(), np.random.random(), multiprocessing.current_process().authkey.hex()],
    "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
    "main": [__name__, __file__, sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals()],
    "threads": threading.active_count(),
    "interrupt": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
    "blocked": [str(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    "input": sys.stdin.readable(),
}
place.write_text(json.dumps(seen))
def fail():
    raise ValueError("the end")
fail()
"""


def test_a_script_sees_a_process_of_its_own_and_its_exit_handlers_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SEEN)
    ended = RealRun(["launch", "-n", "2", str(script), str(tmp_path)], tmp_path / "run").end()
    assert ended.code == 1
    assert f'Traceback (most recent call last):\n  File "{script}", line 21, in <module>\n' in ended.err
    assert all((tmp_path / f"{rank}.end").exists() for rank in range(2))
    one, other = (json.loads((tmp_path / str(rank)).read_text()) for rank in range(2))
    for mine, others in zip(one.pop("drawn"), other.pop("drawn"), strict=True):
        assert mine != others, "workers draw different samples"
    assert one == other
    assert one["process"] == ["MainProcess", None]
    assert one["main"] == ["__main__", str(script), [str(script), str(tmp_path)], str(tmp_path), True]
    assert (one["threads"], one["interrupt"], one["blocked"], one["input"]) == (1, True, [], True)


WAITS = """
import os, sys, time
open(os.path.join(sys.argv[1], "pid-" + os.environ["RANK"]), "w").write(str(os.getpid()))
time.sleep(10_000)
"""


def test_a_script_ends_with_its_launcher_before_it_joins(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WAITS)
    run = RealRun(["launch", "-n", "2", str(tmp_path / "script.py"), str(tmp_path)], tmp_path / "run")
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(map(content, files)), PATIENCE, "both scripts run")
    os.kill(run.main.pid, signal.SIGKILL)
    wait_until(lambda: not any(alive(int(content(file))) for file in files), PATIENCE, "the scripts have ended")
    assert run.main.wait(PATIENCE) == -signal.SIGKILL


def test_what_the_first_optimizer_of_pytorch_imports_is_imported_before_the_fork(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "script.py"
    script.write_text('import sys\nopen(sys.argv[1], "w").write(str("torch._dynamo" in sys.modules))\n')
    words = ["launch", "-n", "1", str(script), str(tmp_path / "seen")]
    RealRun(words, tmp_path / "run", torch=True, afresh=True).end()
    assert (tmp_path / "seen").read_text() == "True"
