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
    assert "def steps_of" in (tmp_path / "run" / "function" / "program.py").read_text()
    assert (tmp_path / "run" / "function" / "returned-1.bin").exists()


FAILING = """
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
    return {"model": object()}
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
    assert "worker 1 raised ValueError: this batch is bad (program.py, line" in ended.stdout
    assert ', in inner\n    raise ValueError("this batch is bad")\n' in ended.stdout
    assert "the result of keep['model'] is builtins.object, which cannot be saved: keep arrays" in ended.stdout
    assert [RunFolder(tmp_path / name).read_summary().status for name in ("fail", "keep")] == ["failed", "finished"]


REFUSED = """
import functools, pathlib, threading
import numpy as np
import flockstep
from flockstep.errors import ConfigurationError

lock, texts = threading.Lock(), np.array(["a", "b"])

def locks(): return lock
def reads(): return texts
def plain(): return 1

def within():
    def inner(): return lock
    return inner

def changed(): return 1

file = pathlib.Path(__file__)
file.write_text(file.read_text().replace("def changed(): return 1", "def changed(): return 2"))
for function, args in [
    (locks, ()), (reads, ()), (plain, (lock,)), (within(), ()), (lambda: 1, ()),
    (functools.partial(plain), ()), (changed, ()),
]:
    try:
        flockstep.launch(function, 2, args, out="run")
    except ConfigurationError as error:
        print(error)
"""


def test_what_cannot_travel_is_refused_before_anything_starts(tmp_path: Path) -> None:
    ended = run_script(tmp_path, REFUSED)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "run").exists()
    starts = [
        "locks uses lock, which cannot be sent to another process (lock is _thread.lock",
        "reads uses texts, which cannot be sent to another process (texts is numpy.ndarray",
        "plain uses args[0], which cannot be sent to another process (args[0] is _thread.lock",
        "launch takes a function that is defined at the top level of a notebook cell or module, got within.<locals>.i",
        "launch takes a function that is defined at the top level of a notebook cell or module, got <lambda>",
        "launch takes a function, got partial",
        "the source of changed is not known, or was changed since",
    ]
    printed = ended.stdout.splitlines()
    assert [line.startswith(start) for line, start in zip(printed, starts, strict=True)] == [True] * 7, printed


HELD = """
from abc import ABC
from dataclasses import dataclass, field
from enum import Enum
import functools
import numpy as np
import flockstep
from flockstep.errors import ConfigurationError

STEPS = 10
class Kind(Enum):
    FEW = 1
    MANY = 2
class Loss:
    pass
class Config(ABC):
    lr = 0.5
    steps = STEPS
    table = {"a": 1}
    kind = Kind.FEW
    loss = Loss()
    dtype = np.float32
    __slots__ = ()
    class Inner:
        depth = 2
    def scaled(self, by=STEPS, *, at=Kind.FEW):
        return by * self.lr * at.value
    @staticmethod
    def least(of=(STEPS,)):
        return of
    @property
    def rate(self):
        return self.lr
@dataclass
class Options:
    goal: float = STEPS
    each: list = field(default_factory=list)
def helper(steps=STEPS, cut=np.tanh, *, lr=Config.lr, options=Options()):
    return steps, lr, options.goal, Options().goal
@functools.lru_cache
def cached(steps=STEPS):
    return steps

def values():
    found = Config()
    return {
        "helper": helper(), "cached": cached(), "class": (Config.lr, Config.table, Config.added, Config.Inner.depth),
        "methods": (found.scaled(), found.least(), found.rate), "calls": helper.calls,
    }

def train():
    flockstep.join().close()
    return values()

helper.calls = 3
STEPS = 1000
Config.lr = 0.01
Config.table["b"] = 2
Config.added = np.ones(2).tolist()
Config.Inner.depth = 4

def replaced(): return Patched().step()
class Patched:
    def step(self): return 1
def other(self): return 2
Patched.step = other
def shared(): return Shared.loss
class Shared:
    loss = np.tanh
Shared.loss = np.sin
def marked(): return marked.lock
import threading
marked.lock = threading.Lock()
def more(a, b=1): return a
more.__defaults__ = (1, 2)
def members(): return Members
class Members(Enum):
    MANY = STEPS
STEPS = 2000
def late(loss=np.tanh): return loss
late.__defaults__ = (np.sin,)

if __name__ == "__main__":
    result = flockstep.launch(train, 1, transport="ipc", out="run")
    assert result.returned[0] == values(), (result.returned[0], values())
    print(values())
    for function in (replaced, shared, marked, more, late, members):
        try:
            flockstep.launch(function, 1, out="none")
        except ConfigurationError as error:
            print(error)
"""


def test_workers_have_the_attributes_and_default_arguments_of_today(tmp_path: Path) -> None:
    ended = run_script(tmp_path, HELD)
    assert ended.returncode == 0, ended.stderr
    first, *refused = ended.stdout.splitlines()
    assert "'helper': (10, 0.5, 10, 10), 'cached': 10, 'class': (0.01, {'a': 1, 'b': 2}, [1.0, 1.0], 4)" in first
    starts = [
        "Patched.step holds a function that may differ", "Shared.loss holds a ufunc that may differ",
        "marked.lock holds a lock that may differ", "more has other default arguments than its source",
        "late.__defaults__[0] holds a ufunc that may differ", "Members.MANY is another member than the one in its",
    ]  # fmt: skip
    assert [line.startswith(start) for line, start in zip(refused, starts, strict=True)] == [True] * 6, refused
    assert not (tmp_path / "none").exists()


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
