"""Hosts that do not meet, or that differ: both ends say why. Each host is a network namespace."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hosts import PORT, SECRET, Ended, Host, network, on_all, require, require_idle
from support.matrix import few
from support.processes import COMMAND, PATIENCE, wait_until

JOB = "softmax(features=20000, train=64, test=16)"
ESTABLISHED, CLOSE_WAIT = "01", "08"  # in /proc/net/tcp


@pytest.fixture
def two() -> Iterator[list[Host]]:
    with network(2) as hosts:
        yield hosts


def refused(two: list[Host], tmp_path: Path, second: list[str], **environment: str) -> tuple[str, str]:
    """What both ends print where the second host may not join; the coordinator is stopped then."""
    script = tmp_path / "script.py"
    if not script.exists():
        script.write_text("import flockstep\n")
    where = ["--coordinator", f"{two[0].address}:{PORT}"]
    first = two[0].start(
        "launch", "--nodes", "2", "--node-rank", "0", *where, "-n", "4", "--out", tmp_path / "run", script
    )
    other = Ended.of(two[1].start("launch", *where, *second, **environment))
    assert other.code == 2
    wait_until(lambda: not connections(first.pid), PATIENCE, "the coordinator has closed the connection")
    first.send_signal(signal.SIGINT)
    return Ended.of(first).err, other.err


def connections(pid: int) -> list[str]:
    """Lines of the connections to the coordinator's port in the network of a process."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()
    ]
    return [line[1] for line in lines if line[1].endswith(f":{PORT:04X}") and line[3] in (ESTABLISHED, CLOSE_WAIT)]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (
            ["--nodes", "3", "--node-rank", "1", "-n", "4"],
            "started for 3 hosts and 4 workers, the coordinator for 2",
        ),
        (
            ["--nodes", "2", "--node-rank", "1", "-n", "6"],
            "started for 2 hosts and 6 workers, the coordinator for 2",
        ),
        pytest.param(
            ["--nodes", "2", "--node-rank", "1", "-n", "4", "--seed", "7"],
            "seed is 7 on that host and 0 at the coordinator",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_host_that_was_started_differently_is_refused_at_both_ends(
    two: list[Host], tmp_path: Path, second: list[str], said: str
) -> None:
    for err in refused(two, tmp_path, [*second, str(tmp_path / "script.py")]):
        assert said in err


@pytest.mark.full
def test_another_script_is_refused_at_both_ends(two: list[Host], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "script.py"
    other.write_text("import flockstep  # in another version\n")
    for err in refused(two, tmp_path, ["--nodes", "2", "--node-rank", "1", "-n", "4", str(other)]):
        assert re.search(r"job is script.py \(SHA-256 \w+\) on that host and script.py \(SHA-256 \w+\) at", err)


def test_a_wrong_secret_is_refused_at_both_ends(two: list[Host], tmp_path: Path) -> None:
    second = ["--nodes", "2", "--node-rank", "1", "-n", "4", str(tmp_path / "script.py")]
    here, there = refused(two, tmp_path, second, FLOCKSTEP_SECRET=SECRET.upper())
    assert "does not know the secret" in here
    assert "give every host the same secret" in there


@pytest.mark.full
def test_who_has_come_already_or_is_missing_is_told(two: list[Host], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import flockstep\n")
    where = ["--nodes", "3", "--coordinator", f"{two[0].address}:{PORT}", "-n", "3", script]
    first = two[0].start("launch", "--node-rank", "0", "--timeout", "30", "--out", tmp_path / "run", *where)
    second = two[1].start("launch", "--node-rank", "1", *where)
    wait_until(lambda: second.poll() is not None or joined(two[1]), PATIENCE, "node 1 has joined")
    twice = Ended.of(two[1].start("launch", "--node-rank", "1", *where))
    assert twice.code == 2
    assert "has joined already; give every host a different --node-rank" in twice.err
    first.send_signal(signal.SIGINT)
    assert Ended.of(first).code
    assert Ended.of(second).code


def joined(host: Host) -> bool:
    """Whether a connection of the host to the coordinator is established."""
    table = subprocess.run(host.command("cat", "/proc/net/tcp"), check=True, capture_output=True, text=True).stdout
    return any(line.split()[3] == "01" for line in table.splitlines()[1:])


def test_a_coordinator_that_never_comes_and_hosts_that_never_come(two: list[Host], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import flockstep\n")
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}", "-n", "2", "--timeout", "1", script]
    own = ["--node-rank", "1", "--json", "--out", tmp_path / "other"]
    alone = Ended.of(two[1].start("launch", *own, *where))
    assert alone.code == 2
    for option in ("--json", "--out"):
        assert f"{option} has no effect on the host with --node-rank 1: the coordinator writes the record" in alone.err
    assert f"no coordinator answered at {two[0].address}:{PORT} within 1 s" in alone.err
    first = Ended.of(two[0].start("launch", "--node-rank", "0", "--out", tmp_path / "run", *where))
    assert first.code == 2
    assert "node 1 of 2 (rank 1 of 2) did not join within 1 s" in first.err


UNREACHABLE = {
    "no route": (1, ["ip", "route", "del", "10.77.0.0/24"]),
    "a firewall that drops": (0, ["ip", "route", "add", "blackhole", "10.77.0.2"]),
    "a cut cable": (1, ["ip", "link", "set", "eth0", "down"]),
}


@pytest.mark.parametrize("reason", few(list(UNREACHABLE), "no route", "a firewall that drops"))
def test_a_coordinator_that_cannot_be_reached_is_told_on_both_hosts(
    reason: str, two: list[Host], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import flockstep\n")
    on, words = UNREACHABLE[reason]
    two[on].run(*words)
    ended = on_all(two, "launch", "-n", "2", "--timeout", "2", script, first=["--out", tmp_path / "run"])
    assert [one.code for one in ended] == [2, 2]
    assert "node 1 of 2 (rank 1 of 2) did not join within 2 s" in ended[0].err
    assert re.search(f"no coordinator answered at {two[0].address}:{PORT} within 2 s.* the route", ended[1].err)
    require_idle(two)


FULL = {
    "record": r"cannot use .*/full/run: No space left on device; .* choose another place with --out",
    "shared memory": r"cannot allocate \d+ bytes of shared memory: .*; use a smaller model",
}
"""What is full → what the host says."""


@pytest.mark.parametrize(("what", "timeout"), [("record", 1), ("shared memory", 600)])
def test_a_host_that_is_full_is_told_of_on_both_hosts(what: str, timeout: int, two: list[Host], tmp_path: Path) -> None:
    """Shared memory counts as a file: a limit on the size of files stands for a host without room.

    The coordinator whose record has no room never listens, so that the other host waits for it until the timeout.
    """
    out, limited = tmp_path / "run", list[str]()
    if what == "record":
        out = tmp_path / "full" / "run"
        out.parent.mkdir()
        two[0].run("mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", str(out.parent))
    else:
        limited = ["prlimit", "--fsize=1000000", *COMMAND]
    where = ["--nodes", "2", "--coordinator", f"{two[0].address}:{PORT}", "--timeout", str(timeout)]
    arguments = ["train", JOB, "-s", "all_reduce", "-n", "4", "--steps", "3", *where]
    processes = [two[1].start(*arguments, "--node-rank", "1", command=limited)]
    processes.insert(0, two[0].start(*arguments, "--node-rank", "0", "--out", out))
    ended = [Ended.of(process) for process in processes]
    assert {one.code for one in ended} <= {1, 2}
    assert re.search(f"^flockstep: .*{FULL[what]}", ended[0].err, re.MULTILINE), ended[0].err
    assert all(one.err.count("flockstep: ") and "Traceback" not in one.err for one in ended)
    require_idle(two)


def test_a_firewall_that_blocks_the_workers_alone_is_told_of(two: list[Host], tmp_path: Path) -> None:
    """It drops what comes from the workers' ports of host 0; the coordinator's port is open."""
    rule = ["ip", "rule", "add", "ipproto", "tcp", "sport", "29600-29610", "blackhole"]
    if subprocess.run(two[0].command(*rule), check=False, capture_output=True).returncode:
        pytest.skip("this system has no routing rules by port")
    arguments = ["train", JOB, "-s", "all_reduce", "-n", "2", "--steps", "3"]
    arguments += ["--transport", "tcp(memory=true, ports='29600-29610')"]
    sooner = tmp_path / "sooner.py"
    sooner.write_text("from flockstep.links import handshake\nhandshake.PATIENCE, handshake.HEARTBEATS = 5.0, 1\n")
    arguments += ["--import", str(sooner)]
    ended = on_all(two, *arguments, first=["--out", tmp_path / "run"])
    require(ended, 1, 1)
    for one in ended:
        assert re.search(r"worker [01] did not answer at tcp://10.77.0.1:2960\d \(\d+ attempts in \d+ s\)", one.err)
        assert "let the firewall allow the workers' ports" in one.err
    require_idle(two)
