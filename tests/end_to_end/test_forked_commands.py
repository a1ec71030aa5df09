"""A command that the tests fork from a process with its imports sees what it sees in an interpreter of its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux only")

PORTRAIT = """
import flockstep.cli.runs, flockstep.launchers.script, flockstep.launchers.train
import atexit, json, multiprocessing, random, sys
import numpy
from facts import facts, os
from pathlib import Path
seen = facts()
seen["arguments"].pop()
del seen["garbage"][2]
seen["variables"] = dict(os.environ)
seen["known to others"] = Path("/proc/self/environ").read_text().split(chr(0)).count("TMPDIR=" + os.environ["TMPDIR"])
seen["modules"] = sorted({*sys.modules} - {"command_forker"})
authkey = bytes(multiprocessing.current_process().authkey).hex()
drawn = [random.random(), numpy.random.random(), authkey]
text = json.dumps({"seen": seen, "drawn": drawn, "parent": os.getppid()})
Path(sys.argv[-1]).write_text(text.replace(os.environ["TMPDIR"], "SCRATCH").replace(sys.argv[-1], "PLACE"))
atexit.register(print, "at the end")
sys.exit(7)
"""
"""Python that a command does first. The command line that others see and the number of frozen objects do differ."""


def portrait(place: Path, afresh: bool) -> dict[str, Any]:
    """What a command sees, and what it draws at random."""
    ended = RealRun(["train", str(place)], place, before=PORTRAIT, afresh=afresh).end()
    assert (ended.code, ended.out, ended.err) == (7, "at the end\n", "")
    found: dict[str, Any] = json.loads(place.read_text())
    return found


def test_a_forked_command_sees_what_a_command_in_a_new_interpreter_sees(tmp_path: Path) -> None:
    forked, fresh, again = (portrait(tmp_path / str(number), number == 1) for number in range(3))
    assert fresh["parent"] == os.getpid() != forked["parent"] == again["parent"]
    assert fresh["seen"].keys() == forked["seen"].keys()
    for one in (forked, again):
        assert {name for name, value in one["seen"].items() if value != fresh["seen"][name]} == set()
    for values in zip(forked["drawn"], fresh["drawn"], again["drawn"], strict=True):
        assert len(set(values)) == 3
    assert fresh["seen"]["known to others"] == 1


def test_a_command_with_another_environment_starts_in_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANG", "C")
    assert portrait(tmp_path / "seen", False)["parent"] == os.getpid()
