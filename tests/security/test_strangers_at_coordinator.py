"""A stranger without the secret floods the coordinator's port from another host; a distant host still joins the run."""

from __future__ import annotations

from pathlib import Path

from support.hosts import PORT, Ended, network, require, require_idle, summary
from support.processes import PATIENCE, content, wait_until

FLOOD = """
import collections, os, socket, sys, time
from pathlib import Path
from flockstep.links.handshake import ENCRYPTED

where, told = (sys.argv[1], int(sys.argv[2])), Path(sys.argv[3])
held, begun, count = collections.deque(maxlen=300), time.monotonic(), 0
while True:
    count += 1
    time.sleep(max(0.0, begun + count / 300 - time.monotonic()))
    try:
        held.append(socket.create_connection(where, 1.0))
        held[-1].sendall(ENCRYPTED + os.urandom(32))
    except OSError:  # the coordinator has ended, or takes no more connections at the moment
        pass
    if count == 600:
        told.write_text("600 hellos")
"""
"""A stranger that says 300 hellos per second, and holds its connections until the coordinator closes them."""
DISTANCE = """
import sys, threading
from pathlib import Path
from flockstep_lab.link_faults import FaultProxy

proxy = FaultProxy((sys.argv[1], int(sys.argv[2])), ("delay",), 1, every=1, most=30)
half = Path(sys.argv[3] + ".half")
half.write_text(str(proxy.address[1]))
half.rename(sys.argv[3])
threading.Event().wait()
"""
"""A proxy that holds back the first bytes of a link for 0.2 s each, as a slow network does."""


def test_a_distant_host_joins_while_a_stranger_floods_the_coordinator(tmp_path: Path) -> None:
    run, flooded, port = tmp_path / "run", tmp_path / "flooded", tmp_path / "port"
    arguments = ["train", "softmax", "-s", "all_reduce", "-n", "2", "--steps", "5", "--nodes", "2", "--timeout", "60"]
    with network(3) as (coordinator, distant, stranger):
        where = coordinator.address, str(PORT)
        first = coordinator.start(*arguments, "--node-rank", "0", "--coordinator", ":".join(where), "--out", run)
        flood = stranger.start(*where, flooded, program=FLOOD)
        proxy = distant.start(*where, port, program=DISTANCE)
        wait_until(lambda: flooded.exists() and port.exists(), PATIENCE, "600 hellos, and the proxy")
        own = ["--node-rank", "1", "--host-address", distant.address]
        second = distant.start(*arguments, *own, "--coordinator", f"127.0.0.1:{content(port).decode()}")
        require([Ended.of(first), Ended.of(second)], 0, 0)
        flood.kill()
        proxy.kill()
        require_idle([coordinator])
    assert [worker["steps"] for worker in summary(run)["per_worker"]] == [5, 5]
