"""The communicator in real processes under `flockstep launch`: alone, beside a strategy, among strangers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.matrix import few
from support.processes import PATIENCE, Ended, RealRun, content, open_files, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds processes through /proc")

START = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import flockstep
from flockstep.errors import PeerLost

HERE = Path(__file__).parent

def until(name):
    while not (HERE / name).exists():
        time.sleep(0.005)
"""


def started(tmp_path: Path, body: str, *options: str) -> RealRun:
    script = tmp_path / "script.py"
    script.write_text(START + body)
    return RealRun(["launch", *options, str(script)], tmp_path / "run")


def ended(tmp_path: Path, body: str, *options: str) -> Ended:
    return started(tmp_path, body, *options).end()


def went_well(done: Ended) -> None:
    assert done.code == 0, done.err
    assert "flockstep:" not in done.err
    assert "Traceback" not in done.err


EVERYTHING = """
with flockstep.join() as comm:
    n, rank = comm.workers, comm.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    comm.serve("square", lambda source, array: array**2 + source)
    window = comm.window("w", np.zeros((2, 3), np.float32))
    for codec in (None, "half"):
        x = np.arange(6.0).reshape(2, 3) + rank
        total = sum(np.arange(6.0).reshape(2, 3) + r for r in range(n))
        comm.send(right, "x", x, codec)
        assert (comm.receive("x", left, 30) == x - rank + left).all()
        assert (comm.request(right, "square", x, codec, 30) == x**2 + rank).all()
        assert (comm.all_reduce(x, codec=codec) == total).all()
        assert (comm.all_reduce(x, average=True) == total / n).all()
        assert (comm.broadcast(x, source=1, codec=codec) == x - rank + 1).all()
        assert [a[0, 0] for a in comm.all_gather(x, codec)] == list(range(n))
        assert np.concatenate(comm.all_gather(comm.reduce_scatter(x, codec=codec))).tolist() == total.ravel().tolist()
        reduced = comm.reduce(x, codec=codec)
        assert (reduced == total).all() if rank == 0 else reduced is None
        comm.neighbor_average(x, codec=codec)
        window.put(right, x, codec=codec)
        window.fence()
        assert (window.array == x - rank + left).all()
        window.fence()
        for to in range(n):
            window.accumulate(to, x, scale=2.0, codec=codec)
        window.fence()
        assert (window.get(right, codec=codec, timeout=30) == total * 2 + x).all()
        comm.barrier()
    print("all is well on", rank)
"""


@pytest.mark.parametrize(
    ("workers", "transport"),
    few([(4, "shared_memory"), (3, "shared_memory"), (2, "ipc"), (2, "tcp")], (3, "shared_memory")),
)
def test_every_call_between_real_processes(tmp_path: Path, workers: int, transport: str) -> None:
    done = ended(tmp_path, EVERYTHING, "-n", str(workers), "--transport", transport)
    went_well(done)
    assert sorted(line for line in done.out.splitlines() if "well" in line) == [
        f"all is well on {rank}" for rank in range(workers)
    ]
    assert done.summary is not None
    assert done.summary["status"] == "finished"
    for worker in done.summary["per_worker"]:
        assert worker["sent_bytes"] > 300
        assert worker["messages_sent"] > 30


@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc", "nsenter"))), reason="needs root")
def test_between_hosts_in_namespaces_and_no_bridge_is_left(tmp_path: Path) -> None:
    pid = next(pid for pid in range(2**22 - 1, 0, -1) if not Path(f"/proc/{pid}").exists())
    old, made = Path(f"/sys/class/net/fs{pid}"), ["ip", "link", "add", f"fs{pid}", "type", "bridge"]
    if subprocess.run(made, check=False).returncode:
        pytest.skip("this machine allows no bridges")
    body = "with flockstep.join() as comm:\n    print('sum', comm.all_reduce(np.ones(2)).tolist())"
    done = ended(tmp_path, body, "-n", "2", "--transport", "namespaces")
    went_well(done)
    assert done.out.count("sum [2.0, 2.0]") == 2
    assert not old.exists(), "the bridge of a supervisor that was killed"


KILLED = """
comm = flockstep.join()
if comm.rank == 2:  # what it had said last would die with it, so it says nothing
    for rank in (0, 1):
        comm.receive("here", rank)
    os.kill(os.getpid(), signal.SIGKILL)
comm.send(2, "here", np.ones(1))
try:
    comm.receive("never", source=2)
except PeerLost as error:
    print(error, flush=True)
try:
    comm.all_reduce(np.ones(3))
except PeerLost as error:
    print("collective:", "worker 2 was killed by SIGKILL" in str(error), flush=True)
comm.send(1 - comm.rank, "on", np.ones(1))
comm.receive("on", 1 - comm.rank)
comm.close()
"""


def test_a_killed_rank_is_named_and_the_others_may_go_on(tmp_path: Path) -> None:
    done = ended(tmp_path, KILLED, "-n", "3")
    went_well(done)
    for rank in (0, 1):
        assert f"worker 2 was killed by SIGKILL; worker {rank} waited for 'never'" in done.out
    assert done.out.count("collective: True") == 2
    assert done.summary is not None
    assert [lost["node"] for lost in done.summary["lost"]] == [2]


JOINS = [
    ("flockstep.join(1000 + rank)", 2, "every worker must join with the same max_bytes, got 100"),
    ("if rank == 0: flockstep.join()", 0, "worker 1 exited with code 0 without joining the run"),
    ("flockstep.join(); flockstep.join()", 2, "this process has joined the run already; call flockstep.join once"),
]


@pytest.mark.parametrize(("body", "code", "text"), few(JOINS, JOINS[0], JOINS[2]))
def test_who_does_not_join_as_the_others_do_is_told(tmp_path: Path, body: str, code: int, text: str) -> None:
    who = "from flockstep.runtime.node_spec import spec_from_environment\nrank = spec_from_environment().address\n"
    done = ended(tmp_path, who + body, "-n", "2")
    assert done.code == (code or 1)
    assert text in done.err


BESIDE = """
from flockstep.arrays.schema import Schema
from flockstep.runtime.loop import Loop
from flockstep.runtime.plan import LocalOptimizer
from flockstep.optimizers.sgd import SGD
from flockstep.strategies.base import Strategy

params = np.full(20, 1, np.float32)
arguments = Strategy.parse(STRATEGY), LocalOptimizer(SGD(lr=0.1), params), SGD(lr=0.1)
loop = Loop(params, np.zeros(20, np.float32), Schema.of({"w": (20,)}), *arguments)
comm = flockstep.join()
rank = comm.rank
inbox = comm.window("inbox", np.zeros(3))
for step in range(20):
    loop.gradients[:] = params - rank
    loop.step()
    inbox.accumulate((rank + 1) % comm.workers, np.ones(3))
    assert comm.all_reduce(np.array(step), name="steps") == step * comm.workers
inbox.fence()
assert inbox.array.tolist() == [20, 20, 20]
loop.finish()
print("finished", rank)
"""


@pytest.mark.parametrize("strategy", few(["bsp", "all_reduce"], "bsp"))
def test_a_communicator_beside_a_strategy(tmp_path: Path, strategy: str) -> None:
    done = ended(tmp_path, BESIDE.replace("STRATEGY", repr(strategy)), "-n", "3")
    went_well(done)
    assert done.out.count("finished") == 3
    assert done.summary is not None
    assert [worker["steps"] for worker in done.summary["per_worker"]] == [20, 20, 20]
    assert done.summary["scalars"]["communicator_sent_bytes"] >= 3 * 20 * 3 * 8, "what the window was sent"


EXAMPLE = Path(__file__).parents[2] / "examples" / "one_sided_gossip.py"


def test_the_page_shows_the_example_as_it_is() -> None:
    page = EXAMPLE.parents[1] / "docs" / "how-to" / "communicator.md"
    assert f"```python\n{EXAMPLE.read_text()}```" in page.read_text()


@pytest.mark.full
def test_a_scheme_of_one_s_own_brings_all_models_to_the_truth(tmp_path: Path) -> None:
    done = RealRun(["launch", "-n", "3", str(EXAMPLE)], tmp_path / "run").end()
    went_well(done)
    distances = re.findall(r"rank \d: the mean of all models is ([\d.]+) from the truth", done.out)
    assert len(distances) == 3
    assert len(set(distances)) == 1, "all know the same mean"
    assert float(distances[0]) < 0.05


AMONG_STRANGERS = """
with flockstep.join() as comm:
    comm.barrier()
    if comm.rank == 0:
        (HERE / "there").touch()
    if comm.rank == 0:
        until("go on")
    for step in range(200):
        assert comm.all_reduce(np.full(1000, step), name="go").tolist() == [3 * step] * 1000
    print("undisturbed", comm.rank)
"""
LISTEN = "0A"  # in /proc/net/tcp
GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 256, b"\xff" + bytes(8) + b"\x01\x7f\x03\x00NULL" + bytes(64)]


def ports(run: RealRun) -> set[int]:
    """Ports on which the processes of a run listen."""
    inodes = {file for pid in run.processes() for file in open_files(pid) if file.startswith("socket:")}
    rows = [line.split() for line in content("/proc/net/tcp").decode().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == LISTEN and f"socket:[{row[9]}]" in inodes}


def test_strangers_do_not_disturb_a_communicator(tmp_path: Path) -> None:
    run = started(tmp_path, AMONG_STRANGERS, "-n", "3", "--transport", "tcp")
    wait_until((tmp_path / "there").exists, PATIENCE, "all have joined")
    found = ports(run)
    assert len(found) == 6, "buses of three workers and three communicators"
    for port in found:
        for garbage in (*GARBAGE, b"", b"junk", bytes(1 << 20)):
            with socket.create_connection(("127.0.0.1", port)) as raw, contextlib.suppress(OSError):
                raw.sendall(garbage)
    (tmp_path / "go on").touch()
    done = run.end()
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if line.startswith("flockstep:")]
    assert all("refused a connection from 127.0.0.1" in line for line in said), done.err
    assert 0 < len(said) <= 6, "a line for each bus"
    assert done.out.count("undisturbed") == 3
