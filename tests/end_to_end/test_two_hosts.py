"""One run on two hosts, each a network namespace with two workers: memory within a host, TCP between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.processes import Ended, RealRun

JOB = "softmax(features=20000, train=64, test=16)"
STEPS = 20
HERE, THERE = "10.77.0.1", "10.77.0.2"
TRANSPORT = f"""
import ctypes, os
from dataclasses import dataclass
from flockstep import registry
from flockstep.transports.kinds import Tcp

THERE = os.environ["OTHER_HOST"]


@dataclass(frozen=True)
class TwoHosts(Tcp):
    memory: bool = True

    def listen(self, directory, name):
        if name.partition("-line")[0] not in ("worker-2", "worker-3"):
            return "tcp://{HERE}:*"
        if ctypes.CDLL(None, use_errno=True).setns(os.open("/run/netns/" + THERE, os.O_RDONLY), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
        return "tcp://{THERE}:*"


registry.register("transport", "two_hosts", TwoHosts)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    """Names of two network namespaces that a cable joins; this process is in the first meanwhile."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and ip")
    names = f"fsa{os.getpid()}", f"fsb{os.getpid()}"
    try:
        try:
            for name, cable in zip(names, ("cablea", "cableb"), strict=True):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
                if cable == "cableb":
                    ip("link", "add", "cablea", "netns", names[0], "type", "veth", "peer", "cableb", "netns", name)
            for name, cable, address in zip(names, ("cablea", "cableb"), (HERE, THERE), strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr.decode().strip()}")
        monkeypatch.setenv("OTHER_HOST", names[1])
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def sent(host: str, card: str) -> int:
    """Bytes that have left by that network card."""
    command = ["ip", "netns", "exec", host, "cat", f"/sys/class/net/{card}/statistics/tx_bytes"]
    return int(subprocess.run(command, check=True, capture_output=True).stdout)


def trained(strategy: str, hosts: tuple[str, str], folder: Path) -> tuple[Ended, list[str]]:
    """A run of 4 workers, two on each host, and its arguments but for the transport."""
    folder.mkdir()
    module = folder / "two_hosts.py"
    module.write_text(TRANSPORT)
    arguments = ["train", JOB, "-s", strategy, "-n", "4", "--steps", str(STEPS), "--seed", "1"]
    arguments += ["--evaluate-every", str(STEPS)]  # models to be evaluated go to the supervisor, on the first host
    options = ["--transport", "two_hosts", "--import", str(module)]
    run = RealRun([*arguments, *options], folder / "run", within=("ip", "netns", "exec", hosts[0])).end()
    assert run.code == 0, run.err
    return run, arguments


def test_memory_within_a_host_and_tcp_between_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    run, arguments = trained("all_reduce(ring)", hosts, tmp_path / "ring")
    assert run.summary is not None
    payload = [worker["sent_bytes"] for worker in run.summary["per_worker"]]
    between = [sent(hosts[0], "cablea"), sent(hosts[1], "cableb")]
    within = [sent(host, "lo") for host in hosts]
    assert between[0] >= payload[1], "worker 1 sends to worker 2, on the other host"
    assert between[1] >= payload[3], "worker 3 sends to worker 0, on the other host"
    assert within[0] < payload[0] / 2, "what worker 0 sends to worker 1 lies in memory"
    assert within[1] < payload[2] / 10, "what worker 2 sends to worker 3 lies in memory"
    alone = RealRun([*arguments, "--transport", "shared_memory"], tmp_path / "alone").end()
    assert alone.summary is not None
    assert alone.summary["hashes"] == run.summary["hashes"]


def test_the_default_all_reduce_sends_the_model_once_between_two_hosts(hosts: tuple[str, str], tmp_path: Path) -> None:
    """2(h-1)/h of the model leaves each host in every step: once for h = 2, where a ring of 4 sends it 1.5 times."""
    run, _ = trained("all_reduce", hosts, tmp_path / "by_host")
    between = [sent(hosts[0], "cablea"), sent(hosts[1], "cableb")]
    model = 4 * (20000 * 10 + 10)
    for nbytes in between:  # and headers, rank 0's first model, and the snapshots of two workers
        assert STEPS * model <= nbytes < 1.05 * STEPS * model + 4 * model
    assert run.summary is not None
    assert len(set(run.summary["hashes"].values())) == 1
