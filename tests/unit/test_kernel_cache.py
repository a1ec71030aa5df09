"""Compiled kernels on disk are used again only as long as no file has changed that they may be made of.

Processes that need a kernel at once compile it once.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import flockstep
from flockstep.arrays.kernels import compiling

SOURCE = Path(flockstep.__file__).parent
PROGRAM = """
import numpy as np
from flockstep.arrays.kernels import on_numpy
print(on_numpy.pack(np.uint8([1, 1, 0]), 1).tolist())
"""


AT_ONCE = """
import sys, time
from pathlib import Path
from numba.core import event
from flockstep.arrays.kernels import on_numpy

compiled = []
class Listener(event.Listener):
    def on_start(self, given):
        kernel = given.data["dispatcher"].py_func.__qualname__
        compiled.append(f"{kernel}{given.data['args']}".replace(" ", ""))
    def on_end(self, given):
        pass
event.register("numba:compile", Listener())
here, name = Path(sys.argv[1]), sys.argv[2]
(here / name).touch()
while len(list(here.iterdir())) < 2:
    time.sleep(0.001)
assert on_numpy.pack(__import__("numpy").uint8([1, 1, 0]), 1).tolist() == [3]
print(*compiled)
"""


def packed(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def compiled_at_once(folder: Path, here: Path) -> list[str]:
    """The kernels that two processes compile, which need the same at the same time."""
    here.mkdir()
    command, environment = [sys.executable, "-c", AT_ONCE, str(here)], {"PYTHONPATH": str(folder)}
    started = [
        subprocess.Popen([*command, name], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    ended = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    return [name for out, _ in ended for name in out.split()]


def test_a_change_in_one_file_reaches_kernels_of_all(tmp_path):
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE, tmp_path / "flockstep", ignore=ignore)
    kernels = compiled_at_once(tmp_path, tmp_path / "here")
    assert kernels, "nothing was compiled"
    assert set(Counter(kernels).values()) == {1}, "processes compiled a kernel beside each other"
    compiled = sorted(tmp_path.rglob("*.nbi"))
    assert compiled, "nothing was kept"
    stamps = {path: path.stat().st_mtime_ns for path in compiled}
    assert packed(tmp_path) == "[3]"
    assert {path: path.stat().st_mtime_ns for path in compiled} == stamps, "it was compiled again for no reason"
    other = tmp_path / "flockstep" / "arrays" / "kernels" / "numpy_basics.py"
    other.write_text(other.read_text() + "\nCHANGED = True\n")
    assert packed(tmp_path) == "[3]"
    assert any(path.stat().st_mtime_ns != stamp for path, stamp in stamps.items()), "old code was used"


def test_a_process_that_was_stopped_while_it_compiled_is_not_waited_for_forever(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(compiling, "PATIENCE", 0.05)
    began = []
    with (tmp_path / "compiling.lock").open("wb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with compiling._turn(tmp_path):
            began.append("the first")
        fcntl.flock(stopped, fcntl.LOCK_UN)
        with compiling._turn(tmp_path), pytest.raises(BlockingIOError):
            fcntl.flock(stopped, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert began == ["the first"]
