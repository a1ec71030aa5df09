"""Tests that run in several processes are reported as they are in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import PATIENCE

SUPPORT = Path(__file__).parents[1]
HALVES = {
    "test_one": """
import os, pathlib, pytest

@pytest.fixture(autouse=True, scope="module")
def _module(request):
    yield
    print("end of", request.module.__name__)

@pytest.mark.parametrize("n", range(3))
def test_of_many(n, tmp_path):
    print("said", n)
    (tmp_path / "file").touch()
    assert n != 1, os.getpid()

@pytest.mark.skip("not here")
def test_skipped(): pass
""",
    "test_two": """
import os, signal
from conftest import CAPTURED

def test_first(tmp_path):
    print(os.fstat(1).st_ino == CAPTURED, tmp_path.parent.name[:-1])

def test_deadly():
    os.kill(os.getpid(), signal.SIGKILL)

def test_last():
    pass
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in HALVES.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "conftest.py").write_text(KEEPING)
    return tmp_path


KEEPING = """
import json, os, pathlib
import pytest

@pytest.fixture(autouse=True, scope="session")
def _session(request):
    (request.config.rootpath / f"begin-{os.getpid()}").touch()
    yield
    (request.config.rootpath / f"end-{os.getpid()}").touch()

def pytest_runtest_logreport(report):
    if PARENT == os.getpid():
        facts = report.nodeid, report.when, report.outcome, report.capstdout
        with pathlib.Path("reports").open("a") as file:
            print(json.dumps(facts), file=file)

PARENT = os.getpid()
CAPTURED = os.fstat(1).st_ino
"""


def reports(folder: Path, *words: str) -> tuple[list[tuple[str, str, str, str]], str]:
    """What is reported: test, phase, outcome and output; and what pytest prints."""
    command = [sys.executable, "-m", "pytest", "-p", "support.side_by_side", "-p", "no:cacheprovider", "-ra", *words]
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return [tuple(json.loads(line)) for line in (folder / "reports").read_text().splitlines()], done.stdout


def test_all_are_run_once_and_a_process_that_dies_fails_its_test_alone(folder: Path) -> None:
    found, out = reports(folder, "--processes", "2")
    called = {name.partition("::")[2]: outcome for name, when, outcome, _ in found if when == "call"}
    assert called == {
        "test_of_many[0]": "passed", "test_of_many[1]": "failed", "test_of_many[2]": "passed",
        "test_first": "passed", "test_deadly": "failed", "test_last": "passed",
    }  # fmt: skip
    assert len([one for one in found if one[1] == "call"]) == 6
    assert "its process ended with code -9" in out
    assert re.search("2 failed, 4 passed, 1 skipped", out)
    assert re.search(r"SKIPPED \[1\] test_one.py:\d+: not here", out)
    (said,) = [text for name, when, _, text in found if name.endswith("[2]") and when == "call"]
    assert said == "said 2\n"
    (said,) = [text for name, when, _, text in found if name.endswith("test_first") and when == "call"]
    assert said == "False process\n", "a process has its own file of captured output, and its own folder"
    ends = [name for name, when, _, text in found if when == "teardown" and text.endswith("end of test_one\n")]
    assert ends == ["test_one.py::test_skipped"], "a file is torn down after its last test"
    begun, ended = ({path.name.partition("-")[2] for path in folder.glob(f"{name}-*")} for name in ("begin", "end"))
    assert ended < begun
    assert len(begun - ended) == 1, "a session ends in each process that was not killed"


def test_the_first_failure_ends_all_where_that_is_asked_for(folder: Path) -> None:
    (folder / "test_two.py").unlink()
    found, _ = reports(folder, "--processes", "2", "-x")
    assert [(name.partition("::")[2], outcome) for name, when, outcome, _ in found if when == "call"] == [
        ("test_of_many[0]", "passed"), ("test_of_many[1]", "failed"),
    ]  # fmt: skip
    assert len(list(folder.glob("end-*"))) == 1
