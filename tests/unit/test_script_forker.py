"""Which scripts are forked from a process that has imported what they import first, and which start afresh."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flockstep.launchers import script_entry
from flockstep.launchers.script_forker import ForkedScript, ScriptForker
from flockstep.launchers.top_imports import top_imports
from support.processes import PATIENCE, search_path, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scripts are forked on Linux only")

TORCH = "import ctypes, json, threading, types\ndefault_generator = types.SimpleNamespace(seed=lambda: None)\n"
"""A module in place of torch, which loads what torch loads."""
SCRIPT = "import torch\n"


@contextlib.contextmanager
def workers(
    folder: Path, torch: str = TORCH, script: str = SCRIPT, beside: str = "", **variables: str
) -> Iterator[tuple[ScriptForker, list[ForkedScript | None]]]:
    """Two workers of a script, with the process that forks them.

    `torch` is the text of the module torch, `beside` that of another module in the script's folder.
    """
    installed, own = folder / "installed", folder / "own"
    installed.mkdir(parents=True)
    own.mkdir()
    (installed / "torch.py").write_text(torch)
    (own / "script.py").write_text(script)
    if beside:
        (own / "beside.py").write_text(beside)
    environment = {**os.environ, "PYTHONPATH": search_path(installed), **variables}
    entry = [sys.executable, "-I", "-S", script_entry.__file__]
    forker = ScriptForker(own / "script.py", [*entry, str(os.getpid()), str(own / "script.py")], environment, 2)
    scripts: list[ForkedScript | None] = []
    try:
        scripts += [forker.fork(environment_of(rank, environment), "") for rank in range(2)]
        yield forker, scripts
    finally:
        forker.close()
        for one in filter(None, scripts):
            ended(one)
            one.stdout.close()
            one.stderr.close()


def forked(folder: Path, torch: str = TORCH, script: str = SCRIPT, beside: str = "", **variables: str) -> bool:
    """Whether both workers of a script are forked, see `workers`."""
    with workers(folder, torch, script, beside, **variables) as (_, scripts):
        assert len(set(map(bool, scripts))) == 1
        return all(scripts)


def environment_of(rank: int, environment: dict[str, str]) -> dict[str, str]:
    return {**environment, "RANK": str(rank), "FLOCKSTEP_NODE_SPEC": json.dumps({"address": rank, "process": 0})}


def ended(script: ForkedScript) -> int:
    wait_until(lambda: script.poll() is not None, PATIENCE, "the script has ended")
    code = script.poll()
    assert code is not None
    return code


def test_a_script_that_imports_torch_first_is_forked(tmp_path: Path) -> None:
    assert forked(tmp_path)


@pytest.mark.parametrize(
    ("torch", "beside", "variables"),
    [
        (TORCH + "import os; os.environ.get('RANK')", "", {}),
        (TORCH + "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "", {}),
        (TORCH + "print('a word')", "", {}),
        (TORCH + "import sys; sys.stderr.write('a word')", "", {}),
        (TORCH + "import os; os.write(1, b'a word')", "", {}),
        (TORCH + "import sys; sys.settrace(lambda *_: None)", "", {}),
        ("raise ModuleNotFoundError('absent', name='torch')", "", {}),
        ("raise SystemExit", "", {}),
        (TORCH + "import beside", "x = 1", {}),
        (TORCH, "", {"PYTHONPROFILEIMPORTTIME": "1"}),
        (TORCH + "kept = open(__file__)", "", {}),
        (TORCH + "import mmap; kept = mmap.mmap(-1, 4096)", "", {}),
        (TORCH + "import signal; signal.setitimer(signal.ITIMER_REAL, 1000)", "", {}),
        (TORCH + "import os, time; os.fork() or time.sleep(1) or os._exit(0)", "", {}),
    ],
)  # fmt: skip
def test_a_script_starts_afresh_where_a_fork_would_differ(
    torch: str, beside: str, variables: dict[str, str], tmp_path: Path
) -> None:
    assert not forked(tmp_path, torch, SCRIPT, beside, **variables)


@pytest.mark.parametrize("torch", [TORCH, TORCH + "print('a word')"])
def test_no_file_stays_open(torch: str, tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    forked(tmp_path, torch)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank = os.environ.get('HOME')", True),
        ("rank = os.environ.get('RA' + 'NK')", False),
        ("rank = os.environb.get(b'RANK')", False),
        ("raise ValueError", False),
        ("raise ImportError(name='sitecustomize')", True),
    ],
)
def test_a_customization_that_reads_the_rank_is_run_by_each_worker(text: str, expected: bool, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import os\n{text}\n")
    path = search_path(tmp_path / "site", tmp_path / "a" / "installed")
    assert forked(tmp_path / "a", PYTHONPATH=path) == expected


def test_a_customization_that_changes_the_path_changes_that_of_each_worker(tmp_path: Path) -> None:
    """Processes that a worker starts must not find the folder with which its own imports were done."""
    (tmp_path / "site").mkdir()
    text = "import os\nos.environ['PYTHONPATH'] += ':/more'\n"
    text += "os.environ['SEEN'] = str('FLOCKSTEP_PRELOAD' in os.environ)\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(text)
    path = search_path(tmp_path / "site", tmp_path / "a" / "installed")
    script = SCRIPT + "import os\nprint(os.environ['PYTHONPATH'], os.environ['SEEN'])\n"
    with workers(tmp_path / "a", script=script, PYTHONPATH=path) as (_, scripts):
        for one in scripts:
            assert one is not None
            assert ended(one) == 0
            assert one.stdout.read().decode() == f"{path}:/more False\n"


def test_exit_codes_and_signals_are_those_of_the_script(tmp_path: Path) -> None:
    body = "import atexit, os, sys, time\natexit.register(print, 'the end')\n"
    body += "time.sleep(1000) if os.environ['RANK'] == '1' else sys.exit(7)"
    with workers(tmp_path, script=SCRIPT + body) as (_, (leaving, staying)):
        assert leaving is not None
        assert staying is not None
        assert ended(leaving) == 7
        assert leaving.stdout.read() == b"the end\n"
        assert staying.poll() is None
        staying.kill()
        assert ended(staying) == -signal.SIGKILL
        leaving.kill()  # does nothing to what may have its process id now


def test_forked_scripts_end_with_the_process_that_forked_them(tmp_path: Path) -> None:
    with workers(tmp_path, script=SCRIPT + "import time; time.sleep(1000)") as (forker, scripts):
        assert all(scripts)
        assert forker._process is not None
        forker._process.kill()
        for script in filter(None, scripts):
            assert ended(script) == -signal.SIGKILL
            assert script.stdout.read() == b""  # the other end is closed: the process is gone


FAILS_LATER = """
import os
forks, fork = [], os.fork

def fork_once():
    forks.append(1)
    if len(forks) > 1:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = fork_once
"""


def test_a_fork_that_fails_leaves_the_workers_alone_that_were_forked_before(tmp_path: Path) -> None:
    """The later workers start in fresh interpreters."""
    files = len(list(Path("/proc/self/fd").iterdir()))
    body = "import os, time\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.01)\nprint('went on')\n"
    go = tmp_path / "go"
    with workers(tmp_path, TORCH + FAILS_LATER, SCRIPT + body, GO=str(go)) as (forker, (first, second)):
        assert first is not None
        assert second is None
        assert forker.fork({}, "") is None, "no further attempt"
        assert first.poll() is None
        go.touch()
        assert ended(first) == 0
        assert first.stdout.read() == b"went on\n"
    assert len(list(Path("/proc/self/fd").iterdir())) == files


def test_a_script_of_one_worker_is_not_forked(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    forker = ScriptForker(tmp_path / "script.py", ["false"], {}, 1)
    assert forker.fork({}, "") is None


@pytest.mark.parametrize(
    ("text", "imports"),
    [
        ('"""What it does."""\nfrom __future__ import annotations\nimport os, torch\n', ["torch"]),
        ("import numpy as np\nfrom torch import nn, optim as o\n", ["numpy", "torch nn optim"]),
        ("import torch\nfrom torch.utils.data import DataLoader\n", ["torch", "torch.utils.data DataLoader"]),
        ("import torch\nimport other\nimport sklearn\n", ["torch"]),
        ("import other\nimport torch\n", []),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n", []),
        ("import torch\ntorch.set_default_dtype(torch.float64)\nimport sklearn\n", ["torch"]),
        ("import numpy\nimport flockstep\n", []),
        ("from .torch import x\nimport torch\n", []),
        ("import beside\nimport torch\n", []),
        ("import secrets\nimport torch\n", []),
        ("if True:\n    import torch\n", []),
        ("import torch\nfrom", []),
        ("import torch\nx = " + "+".join(["1"] * 100_000), []),
        ("import torch\nx = '\0'", []),
        ("", []),
    ],
)  # fmt: skip
def test_what_a_script_imports_first(text: str, imports: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(text)
    (tmp_path / "beside.py").touch()
    (tmp_path / "secrets.py").touch()  # hides a module of the standard library
    assert top_imports(tmp_path / "script.py") == imports


def test_a_module_that_hides_one_of_the_standard_library_ends_the_list(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import secrets\nimport torch\n")
    (tmp_path / "path").mkdir()
    assert top_imports(tmp_path / "script.py", [str(tmp_path / "path")]) == ["torch"]
    (tmp_path / "path" / "secrets.py").touch()
    assert top_imports(tmp_path / "script.py", [str(tmp_path / "path")]) == []
