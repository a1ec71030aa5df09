"""`flockstep.launch`: functions of a script and of a notebook on real processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from collections.abc import Coroutine
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from flockstep.records.folder import RunFolder
from support.processes import PATIENCE, content

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")
in_a_notebook = pytest.mark.skipif(
    find_spec("ipykernel") is None or find_spec("nbclient") is None, reason="needs ipykernel and nbclient"
)

DEFINED = """
from dataclasses import dataclass
from math import tau as around
from random import randint as drawn

import numpy as np
import xml.etree.ElementTree
import flockstep

@dataclass(frozen=True)
class Options:
    goal: float
    each: tuple = (1, 2)

class Base:
    def end(self, options=None):
        return (options or OPTIONS).goal + drawn(1, 1) - 1

class Model(Base):
    def __init__(self):
        self.params = START.copy()

def steps_of(model, count):
    return [model.params * OPTIONS.goal for _ in range(count)]

OPTIONS = Options(3.0)
START = np.arange(4.0)
twice = steps_of

def train(count, scale):
    import sys
    xml.etree.ElementTree
    communicator = flockstep.join()
    total = communicator.all_reduce(np.ones(1))
    communicator.close()
    print("rank", flockstep.rank(), "of", flockstep.workers())
    model = Model()
    unchanged = "ipykernel" not in sys.modules
    return {"sum": twice(model, count)[-1] * scale * total, "end": model.end(), "tau": around, "anew": unchanged}
"""
CALLED = """
result = flockstep.launch(train, 2, (3, 10.0), transport="ipc", out="run")
assert sorted(result.returned) == [0, 1]
for found in result.returned.values():
    assert (found["sum"] == np.arange(4.0) * 60).all() and found["sum"].dtype == float, found
    assert (found["end"], found["tau"], found["anew"]) == (3.0, around, True), found
assert result.summary.status == "finished" and result.config.workers == 2
"""


def run_script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a program in `folder`."""
    (folder / "script.py").write_text(text)
    command = [sys.executable, "script.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_function_of_a_script_runs_on_workers_and_returns_what_each_computed(tmp_path: Path) -> None:
    guarded = DEFINED + "if __name__ == '__main__':\n" + textwrap.indent(CALLED, "    ")
    ended = run_script(tmp_path, guarded)
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"]
    assert "def train" in (tmp_path / "run" / "function" / "source.py").read_text()
    assert not list((tmp_path / "run").rglob("*.pickle")), "a record holds nothing that could run code"


FAILING = """
import threading

def inner(rank):
    if rank == 1:
        raise ValueError("this batch is bad")

def fail():
    communicator = flockstep.join()
    inner(flockstep.rank())
    communicator.barrier()

def keep():
    communicator = flockstep.join()
    communicator.close()
    return {"model": object(), "lock": threading.Lock()}
"""
RAISED = """
for function in (fail, keep):
    try:
        flockstep.launch(function, 2, transport="ipc", out=function.__name__)
    except flockstep.errors.FlockstepError as error:
        print(error, *getattr(error, "__notes__", ()))
"""


@pytest.mark.full
def test_the_error_of_a_function_comes_with_its_traceback(tmp_path: Path) -> None:
    guarded = DEFINED + FAILING + "if __name__ == '__main__':\n    import flockstep.errors\n"
    ended = run_script(tmp_path, guarded + textwrap.indent(RAISED, "    "))
    assert ended.returncode == 0, ended.stderr
    assert "worker 1 raised ValueError: this batch is bad (script.py, line" in ended.stdout
    assert ', in inner\n    raise ValueError("this batch is bad")\n' in ended.stdout
    assert "cannot be sent to another process (cannot pickle '_thread.lock' object); return arrays" in ended.stdout
    assert [RunFolder(tmp_path / name).read_summary().status for name in ("fail", "keep")] == ["failed", "finished"]


REFUSED = """
import threading
import flockstep
from flockstep.errors import ConfigurationError

lock = threading.Lock()

def locks(): return lock
def plain(): return 1

for function, args in [(locks, ()), (plain, (lock,)), (3, ())]:
    try:
        flockstep.launch(function, 2, args, out="run")
    except ConfigurationError as error:
        print(error)
"""


def test_what_cannot_travel_is_refused_before_anything_starts(tmp_path: Path) -> None:
    ended = run_script(tmp_path, REFUSED)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "run").exists()
    refused = (
        "or its arguments use a value that cannot be sent to another process (cannot pickle '_thread.lock' object)"
    )
    starts = [f"locks {refused}; create the value inside locks", f"plain {refused}", "launch takes a function, got int"]
    printed = ended.stdout.splitlines()
    assert [line.startswith(start) for line, start in zip(printed, starts, strict=True)] == [True] * 3, printed


HELD = """
from dataclasses import dataclass
from enum import Enum
import flockstep

STEPS = 10
class Kind(Enum):
    MANY = 2
class Config:
    lr = 0.5
    kind = Kind.MANY
def helper(steps=STEPS):
    return steps
def other(self):
    return 2

def closure(depth):
    def inner(factor):
        flockstep.join().close()
        return depth * factor(STEPS), Config.lr, Config.kind, Config.step(None), helper(), helper.calls
    return inner

helper.calls = 3
helper.__defaults__ = (20,)
STEPS = 1000
Config.lr = 0.01
Config.step = other

if __name__ == "__main__":
    result = flockstep.launch(closure(4), 1, (lambda steps: steps + 1,), transport="ipc", out="run")
    assert result.returned[0] == (4004, 0.01, Kind.MANY, 2, 20, 3), result.returned
"""


def test_closures_and_lambdas_travel_with_the_attributes_and_defaults_of_today(tmp_path: Path) -> None:
    ended = run_script(tmp_path, HELD)
    assert ended.returncode == 0, ended.stderr


class Notebook:
    """A notebook's kernel, which runs cells one after the other."""

    def __init__(self, folder: Path):
        import nbformat
        from nbclient import NotebookClient

        self.nodes = nbformat.v4
        self.notebook = self.nodes.new_notebook()
        self.client = NotebookClient(
            self.notebook, timeout=int(PATIENCE), resources={"metadata": {"path": str(folder)}}, kernel_name="python3"
        )

    async def run(self, text: str) -> str:
        """Run a cell; return what it printed."""
        cell = self.nodes.new_code_cell(text)
        self.notebook.cells.append(cell)
        await self.client.async_execute_cell(cell, len(self.notebook.cells) - 1)
        return "".join(one["text"] for one in cell.outputs if one["output_type"] == "stream")

    async def interrupt(self) -> None:
        """Interrupt the kernel, as the button does."""
        await self.client.km.interrupt_kernel()


def with_kernel(folder: Path, script: Any) -> None:
    """Run the coroutine `script(notebook)` beside a kernel."""

    async def whole() -> None:
        notebook = Notebook(folder)
        async with notebook.client.async_setup_kernel():
            await script(notebook)

    run: Coroutine[Any, Any, None] = whole()
    asyncio.run(run)


@in_a_notebook
@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_function_of_a_notebook_runs_on_workers_until_the_kernel_is_interrupted(tmp_path: Path) -> None:
    from nbclient.exceptions import CellExecutionError

    async def script(notebook: Notebook) -> None:
        await notebook.run(DEFINED)
        printed = await notebook.run(CALLED)
        assert sorted(printed.splitlines()) == ["[rank 0] rank 0 of 2", "[rank 1] rank 1 of 2"]
        await notebook.run(FAILING)
        with pytest.raises(CellExecutionError, match="worker 1 raised ValueError: this batch is bad"):
            await notebook.run("flockstep.launch(fail, 2, transport='ipc', out='fail')")
        await notebook.run(
            "def wait():\n"
            "    import os, time\n"
            "    from pathlib import Path\n"
            "    communicator = flockstep.join()\n"
            "    Path(f'pid-{flockstep.rank()}').write_text(str(os.getpid()))\n"
            "    while True: communicator.all_reduce(np.ones(1)); time.sleep(0.01)\n"
        )
        waiting = asyncio.create_task(notebook.run("flockstep.launch(wait, 2, transport='ipc', out='wait')"))
        while not all(content(tmp_path / f"pid-{rank}") for rank in range(2)):
            assert not waiting.done(), waiting.result()
            await asyncio.sleep(0.05)
        await notebook.interrupt()
        with pytest.raises(CellExecutionError, match="interrupted; everything computed so far is in"):
            await waiting
        assert await notebook.run("print(flockstep.workers())") == "1\n"

    with_kernel(tmp_path, script)
    statuses = [RunFolder(tmp_path / name).read_summary().status for name in ("run", "fail", "wait")]
    assert statuses == ["finished", "failed", "interrupted"]
    assert not [rank for rank in range(2) if Path(f"/proc/{content(tmp_path / f'pid-{rank}').decode()}").exists()]
