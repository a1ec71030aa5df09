"""A command that the tests fork from a process with its imports sees what it sees in an interpreter of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.hosts import Ended, network
from support.processes import RealRun

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux only")

PORTRAIT = """
import flockstep.cli.runs, flockstep.launchers.entry, flockstep.launchers.script, flockstep.launchers.train
import atexit, json, multiprocessing, os, random, signal, sys
import numpy
from facts import tell
from pathlib import Path

place = sys.argv[-1]
tell(place + "-command")
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["flockstep.launchers.entry", "facts"])
os.environ["LATER"] = "set by the command"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
node = context.Process(target=tell, args=(place + "-node",))
node.start()
node.join()
key = bytes(multiprocessing.current_process().authkey).hex()
Path(place + "-drawn").write_text(json.dumps([random.random(), numpy.random.random(), key]))
Path(place + "-parents").write_text(json.dumps([os.getppid(), multiprocessing.forkserver._forkserver._forkserver_pid]))
atexit.register(print, "at the end")
sys.exit(7)
"""
"""Python that a command does first."""


def portrait(place: Path, afresh: bool = False, command: str = "train") -> dict[str, Any]:
    """What a command sees and draws at random, what a process of its fork server sees, and two process ids."""
    ended = RealRun([command, str(place)], place, before=PORTRAIT, afresh=afresh).end()
    assert (ended.code, ended.out, ended.err) == (7, "at the end\n", "")
    texts = {name: Path(f"{place}-{name}").read_text() for name in ("command", "node", "drawn", "parents")}
    return {
        name: json.loads(text.replace(str(place), "PLACE").replace(command, "VERB")) for name, text in texts.items()
    }


@pytest.mark.full  # what a push runs is forked
def test_a_forked_command_sees_what_a_command_in_a_new_interpreter_sees(tmp_path: Path) -> None:
    fresh, train = portrait(tmp_path / "a", afresh=True), portrait(tmp_path / "b")
    plain, fresh_plain = portrait(tmp_path / "c", command="plan"), portrait(tmp_path / "d", True, "plan")
    assert fresh["parents"][0] == os.getpid() != train["parents"][0] == plain["parents"][0]
    assert differences(plain, fresh_plain) == {"command": [], "node": []}
    # The process that waits to become the fork server has a socket, so that other numbers are free, and more imports.
    assert differences(train, fresh) == {"command": ["children", "files"], "node": ["arguments", "modules"]}
    assert {*train["node"]["modules"]} > {*fresh["node"]["modules"]}
    assert {"torch", "numba"}.isdisjoint(train["node"]["modules"])
    assert train["command"]["children"].split() == [str(train["parents"][1])]
    assert fresh["command"]["known to others"] == fresh["node"]["known to others"] == 1
    for values in zip(fresh["drawn"], train["drawn"], plain["drawn"], strict=True):
        assert len(set(values)) == 3


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, list[str]]:
    """Names of the facts that differ, of the command and of a process of its fork server."""
    return {
        process: sorted(name for name in other[process] if one[process].get(name) != other[process][name])
        for process in ("command", "node")
    }


def test_a_command_with_another_environment_starts_in_a_new_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANG", "C")
    assert portrait(tmp_path / "seen", False)["parents"][0] == os.getpid()


ON_HOST = """
import json, os, socket, sys
from pathlib import Path

spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "uts", "net", "ipc", "pid", "user")}
memory = os.stat("/dev/shm").st_dev, os.getcwd()
seen = spaces, socket.gethostname(), Path("/etc/hosts").read_text(), Path("/proc/self/net/route").read_text(), memory
Path(sys.argv[-1]).write_text(json.dumps(seen))
"""


def test_a_command_that_is_forked_into_a_host_sees_what_a_command_in_the_host_sees(tmp_path: Path) -> None:
    """`support.hosts.Host.start` forks, where `Host.run` calls nsenter."""
    files = {name: tmp_path / name for name in ("forked", "fresh", "here")}
    with network(1) as (host,):
        forked = host.start("launch", files["forked"], within=tmp_path, program=ON_HOST)
        assert Ended.of(forked) == Ended(0, "", "")
        host.run("env", "-C", str(tmp_path), sys.executable, "-c", ON_HOST, str(files["fresh"]))
    subprocess.run([sys.executable, "-c", ON_HOST, str(files["here"])], check=True, cwd=tmp_path)
    seen = {name: json.loads(file.read_text()) for name, file in files.items()}
    assert seen["forked"] == seen["fresh"]
    different = {name for name in seen["here"][0] if seen["forked"][0][name] != seen["here"][0][name]}
    assert different == {"mnt", "uts", "net"}
