"""Whatever else connects to a run over TCP, or is slow in it, does not disturb it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from flockstep.links.connection import UNPROVED
from support.jobs import go_on, paced, undisturbed
from support.matrix import few
from support.processes import PATIENCE, RealRun, content, open_files, search_path, wait_until

STEPS = 60
WHOLE = 4 * PATIENCE
"""Seconds that 20,000 steps of a run may take on a busy machine."""
LISTEN = "0A"  # in /proc/net/tcp
GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x03\x00" + bytes(64),
    b"\xff" + bytes(8) + b"\x01\x7f\x03\x00NULL" + bytes(48) + b"\x02" + b"\xff" * 8,
    bytes(range(256)) * 256,
    b"",
]
REFUSED = (
    r"flockstep: (?:worker|server) \d refused a connection from 127\.0\.0\.1: [^\n]*; "
    r"later refused connections are only counted\n"
)


def listening(run: RealRun) -> set[tuple[str, int]]:
    """Addresses on which the processes of a run listen."""
    inodes = {file for pid in run.processes() for file in open_files(pid) if file.startswith("socket:")}
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in content(f"/proc/net/{table}").decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


@contextlib.contextmanager
def strangers(ports: set[int]) -> Iterator[None]:
    """Peers that do not belong to the run, and stay connected."""
    with contextlib.ExitStack() as peers:
        for port in ports:
            for said in (*GARBAGE, b"", b"junk", msgspec.msgpack.encode(["hello"]), bytes(1 << 20)):
                peer = peers.enter_context(socket.create_connection(("127.0.0.1", port)))
                with contextlib.suppress(OSError):  # it may have been hung up on already
                    peer.sendall(said)
        yield


ATTACK = """
import itertools, os, socket, struct, sys, time
from support.buses import greeting
from flockstep.links.handshake import PLAIN

frames, ports = int(sys.argv[1]), list(map(int, sys.argv[2:]))

def connection(port, said=b""):
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        one.connect(("127.0.0.1", port))
        one.sendall(said)
    except OSError:  # hung up on, or more than the port takes at the moment
        pass
    return one

idle = [connection(port) for port in ports for _ in range(1000 // len(ports))]
slow = [connection(port) for port in ports]
words = itertools.chain(PLAIN, itertools.repeat(0))
for number in range(frames):
    port = ports[number % len(ports)]
    kind = number % 5
    if kind == 0:
        said = os.urandom(64)
    elif kind == 1:  # a hello of this protocol, and then what a peer would say after its proof
        said = PLAIN + os.urandom(32) + greeting(number // 5 % 4 - 1)
    elif kind == 2:
        said = greeting(number // 5 % 4 - 1)
    elif kind == 3:  # a port scan
        said = b""
    else:
        said = struct.pack("<IQQ", 1 << 31, 1 << 62, 0)
    connection(port, said).close()
    if number % 1000 == 0:
        byte = bytes([next(words)])
        for one in slow:
            try:
                one.send(byte)
            except OSError:
                pass
"""


def resident(run: RealRun) -> dict[str, int]:
    """Node → bytes of memory that it holds."""
    pages = {node: int(content(f"/proc/{pid}/statm").split()[1]) for node, pid in run.nodes.items()}
    return {node: count * os.sysconf("SC_PAGE_SIZE") for node, count in pages.items()}


def handles(run: RealRun) -> int:
    """The largest number of files that a node has open."""
    return max(len(open_files(pid)) for pid in run.nodes.values())


@pytest.mark.timeout(12 * PATIENCE)
@pytest.mark.parametrize(("frames", "steps"), few([(100_000, 20_000), (1000, 100)], (1000, 100)))
def test_a_flood_of_strangers_costs_a_run_little_and_changes_no_bit(frames: int, steps: int, tmp_path: Path) -> None:
    """Idle connections, slow senders, a port scan, garbage, and greetings of every rank, while the run trains."""
    options = ["-n", "3", "--steps", str(steps), "--seed", "1", "--target", "0.5"]
    job = paced(tmp_path, slow_after=50)
    run = RealRun(["train", job, "-s", "bsp", "--transport", "tcp", *options], tmp_path / "run")
    run.wait_for_work(20)
    where = listening(run)
    assert {host for host, _ in where} == {"127.0.0.1"}
    ports = {port for _, port in where}
    assert len(ports) == 4, "the buses of three workers and a server"
    before, files, most, raw = resident(run), handles(run), 0, list[socket.socket]()
    command = [sys.executable, "-c", ATTACK, str(frames), *map(str, ports)]
    path = search_path(Path(__file__).parents[1])
    with strangers(ports), subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as attack:
        for port in ports:
            for garbage in GARBAGE:
                raw.append(socket.create_connection(("127.0.0.1", port)))
                with contextlib.suppress(OSError):  # it may have been hung up on already
                    raw[-1].sendall(garbage)
        while attack.poll() is None:
            most = max(most, handles(run))
            assert run.going()
        assert attack.returncode == 0
    for connection in raw:
        connection.close()
    seen = run.steps(0)
    wait_until(lambda: run.steps(0) > seen, PATIENCE, "work goes on")
    grown = {node: size - before[node] for node, size in resident(run).items()}
    go_on(tmp_path)
    ended = run.end(WHOLE)
    assert ended.code == 0
    assert re.fullmatch(REFUSED * 4, ended.err), "each node says once that it refuses strangers"
    assert max(grown.values()) < 16 << 20, grown
    assert most - files <= UNPROVED + 2
    assert ended.summary is not None
    assert ended.summary["lost"] == []
    assert ended.summary["scalars"]["rejected_connections"] >= frames * 0.9
    assert undisturbed(tmp_path / "quiet", job, "bsp", 3, steps, seed=1) == ended.summary["hashes"]


def test_strangers_that_come_before_the_nodes_of_a_run_do_not_take_their_names(tmp_path: Path) -> None:
    """They connect with every node's name to each port as soon as it is there, before the nodes have met."""
    options = ["-n", "3", "--transport", "tcp", "--steps", str(STEPS), "--seed", "1", "--target", "0.5"]
    run = RealRun(["train", paced(tmp_path, slow_after=20), "-s", "bsp", *options], tmp_path / "run")
    met, ports = contextlib.ExitStack(), set[int]()
    with met:
        while not run.steps(0):
            new = {port for _, port in listening(run)} - ports
            met.enter_context(strangers(new))
            ports |= new
            assert run.going()
        assert ports, "somebody listened before the first step"
        go_on(tmp_path)
        ended = run.end()
    assert ended.code == 0
    assert re.fullmatch(f"(?:{REFUSED})*", ended.err)
    assert ended.summary is not None
    assert ended.summary["lost"] == []
    assert [worker["steps"] for worker in ended.summary["per_worker"]] == [STEPS] * 3


def test_a_run_over_ipc_listens_nowhere_and_leaves_no_way_in(tmp_path: Path) -> None:
    job = paced(tmp_path, slow_after=30)
    run = RealRun(["train", job, "-s", "bsp", "-n", "2", "--steps", "60"], tmp_path / "run")
    run.wait_for_work(20)
    assert listening(run) == set()
    sockets = [path for path in run.scratch.rglob("*") if path.is_socket()]
    assert [path.parent.name.partition("-")[0] for path in sockets] == ["pymp"], "only multiprocessing's own is left"
    go_on(tmp_path)
    assert run.end().code == 0


MACHINE = "use an address of this machine, such as 127.0.0.1"


@pytest.mark.parametrize(
    ("transport", "sentence"),
    few(
        [
            ("host='192.0.2.1'", f"cannot listen on tcp://192.0.2.1:.: Cannot assign requested address; {MACHINE}"),
            ("host='nowhere.invalid'", f"host 'nowhere.invalid' does not resolve: .*; {MACHINE}, or interface=NAME"),
            ("interface=nowhere", "interface must be one of the interfaces of this machine, .*, got 'nowhere'"),
            ("ports={port}", "cannot listen on tcp://127.0.0.1:[0-9]+: no free port is left; give a range .*"),
        ],
        ("interface=nowhere", "interface must be one of the interfaces of this machine, .*, got 'nowhere'"),
    ),
)
def test_where_no_node_can_listen_the_run_ends_with_one_sentence(transport: str, sentence: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chosen = f"tcp({transport.format(port=taken.getsockname()[1])})"
        ended = RealRun(["train", "softmax", "-s", "bsp", "--transport", chosen], tmp_path / "run").end()
    assert ended.code == 2
    assert re.fullmatch(f"flockstep: {sentence}\n", ended.err), ended.err


SLOW = """
import multiprocessing, os, time
from flockstep.workloads.softmax import Softmax

def job():
    job = Softmax().job(0)
    plain, slow = type(job.model()).gradients, False
    if multiprocessing.parent_process() is not None:
        try:
            os.close(os.open(__file__ + ".slow", os.O_CREAT | os.O_EXCL))
            slow = True
        except FileExistsError:
            pass

    class Slow(type(job.model())):
        def gradients(self, *arguments):
            until = time.monotonic() + (0.03 if slow else 0.003)
            while time.monotonic() < until:
                pass
            return plain(self, *arguments)

    def model():
        model = job.model()
        model.__class__ = Slow
        return model

    return type(job)(model, job.data, job.optimizer, batch=4)
"""


@pytest.mark.parametrize("strategy", few(["broadcast", "ps(consistency=ssp(3))"], "broadcast"))
def test_a_slow_worker_is_waited_for_and_not_lost(strategy: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    arguments = ["train", str(tmp_path / "slow.py"), "-s", strategy, "-n", "3", "--steps", "60", "--heartbeat", "3"]
    ended = RealRun(arguments, tmp_path / "run").end()
    assert (tmp_path / "slow.py.slow").exists()
    assert (ended.code, ended.err) == (0, "")
    assert ended.summary is not None
    assert ended.summary["lost"] == []
    assert [worker["steps"] for worker in ended.summary["per_worker"]] == [60] * 3
    assert ended.summary["staleness_max"] > (10 if strategy == "broadcast" else 2)
