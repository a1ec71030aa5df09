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
FORKED = """
from flockstep.launchers import script_forker, top_imports
script_forker.top_imports = top_imports.top_imports
"""
"""For a command: scripts are forked as users' scripts are, without the imports that tests add."""


def launched(folder: Path, before: str, *arguments: str) -> tuple[list[dict[str, Any]], Ended]:
    """The portraits of two workers, without the names of the run's own folders, and how the run ended."""
    folder.mkdir()
    run = RealRun(["launch", "-n", "2", PORTRAIT, str(folder), *arguments], folder / "run", torch=True, before=before)
    ended = run.end()
    assert all((folder / f"end-{rank}").exists() for rank in range(2)), "exit handlers have run"
    forked = before != AFRESH
    texts = [(folder / f"portrait-{rank}").read_text() for rank in range(2)]
    found = [json.loads(text.replace(str(folder), "FOLDER").replace(str(run.scratch), "RUN")) for text in texts]
    assert [one["parent"] != run.main.pid for one in found] == [forked] * 2, "the process that forks is the parent"
    return found, ended


@pytest.mark.parametrize("arguments", [(), pytest.param(("pools",), marks=pytest.mark.full)])
def test_a_forked_script_sees_what_a_script_in_a_fresh_interpreter_sees(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    forked, its_end = launched(tmp_path / "forked", FORKED, *arguments)
    fresh, usual_end = launched(tmp_path / "fresh", AFRESH, *arguments)
    for one, other in zip(forked, fresh, strict=True):
        assert {name for name in other["seen"] if one["seen"][name] != other["seen"][name]} == set()
        assert one["seen"].keys() == other["seen"].keys()
    for both in (forked, fresh):
        for mine, other in zip(*(one["drawn"] for one in both), strict=True):
            assert mine != other
    assert its_end.out == usual_end.out == "to the output\n" * 2
    traceback, usual = (end.err.partition("flockstep: worker")[0] for end in (its_end, usual_end))
    assert traceback == usual
    assert traceback.endswith('    raise ValueError("the end")\nValueError: the end\n')
