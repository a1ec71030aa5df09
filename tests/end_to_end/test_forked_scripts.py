"""A script that `flockstep launch` forks sees what it sees in a fresh interpreter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes import CHILDREN, Ended, RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scripts are forked on Linux only")

PORTRAIT = str(CHILDREN.with_name("portrait.py"))
AFRESH = """
from flockstep.launchers import script_forker
script_forker.top_imports = lambda *_: []
"""
"""For a command: each worker's script starts in a fresh interpreter."""
DIFFERENT = {"arguments", "exit handlers", "frames", "garbage", "hooks", "modules", "searched"}
"""Facts that a script that a test forks sees otherwise than a script that `flockstep launch` forks.

They are: the command line in `/proc`, what more modules leave behind, a frame, and the hook that hides the frame.
"""


def launched(folder: Path, before: str, *arguments: str, afresh: bool = True) -> tuple[list[dict[str, Any]], Ended]:
    """The portraits of two workers, without the names of the run's own folders, and how the run ended."""
    folder.mkdir()
    words = ["launch", "-n", "2", PORTRAIT, str(folder), *arguments]
    run = RealRun(words, folder / "run", torch=True, before=before, afresh=afresh)
    ended = run.end()
    assert all((folder / f"end-{rank}").exists() for rank in range(2)), "exit handlers have run"
    forked = before != AFRESH
    texts = [(folder / f"portrait-{rank}").read_text() for rank in range(2)]
    found = [json.loads(text.replace(str(folder), "FOLDER").replace(str(run.scratch), "RUN")) for text in texts]
    assert [one["parent"] != run.main.pid for one in found] == [forked] * 2, "the process that forks is the parent"
    return found, ended


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Ended]:
    """The portraits of scripts that `flockstep launch` forks, and how the run ended."""
    return launched(tmp_path_factory.mktemp("usual") / "forked", "")


@pytest.mark.parametrize("arguments", [(), pytest.param(("pools",), marks=pytest.mark.full)])
def test_a_forked_script_sees_what_a_script_in_a_fresh_interpreter_sees(
    arguments: tuple[str, ...], tmp_path: Path, usual: tuple[list[dict[str, Any]], Ended]
) -> None:
    forked, its_end = launched(tmp_path / "forked", "", *arguments) if arguments else usual
    fresh, usual_end = launched(tmp_path / "fresh", AFRESH, *arguments)
    for one, other in zip(forked, fresh, strict=True):
        assert {name for name in other["seen"] if one["seen"][name] != other["seen"][name]} == set()
        assert one["seen"].keys() == other["seen"].keys()
    for both in (forked, fresh):
        for mine, other in zip(*(one["drawn"] for one in both), strict=True):
            assert mine != other
    assert its_end.out == usual_end.out == "to the output\n" * 2
    assert traceback_of(its_end) == traceback_of(usual_end)


@pytest.mark.full
def test_a_script_that_a_test_forks_sees_what_a_forked_script_sees(
    tmp_path: Path, usual: tuple[list[dict[str, Any]], Ended]
) -> None:
    """The process that has done the imports is a fork of the test's, see `support/children/forked_scripts.py`."""
    tests, its_end = launched(tmp_path / "tests", "", afresh=False)
    forked, usual_end = usual
    for one, other in zip(tests, forked, strict=True):
        assert {name for name in other["seen"] if one["seen"][name] != other["seen"][name]} == DIFFERENT
        assert {*one["seen"]["modules"]} > {*other["seen"]["modules"]}
        assert one["seen"]["arguments"][:3] == other["seen"]["arguments"][:3]
    for mine, other in zip(*(one["drawn"] for one in tests), strict=True):
        assert mine != other
    assert its_end.out == usual_end.out == "to the output\n" * 2
    assert traceback_of(its_end) == traceback_of(usual_end)


def traceback_of(ended: Ended) -> str:
    """What Python has printed of the error that ends the script."""
    text = ended.err.partition("flockstep: worker")[0]
    assert text.endswith('    raise ValueError("the end")\nValueError: the end\n')
    return text
