"""Hosts as network namespaces on one bridge, and the commands that run on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flockstep.launchers import namespaces
from flockstep.simulation import units
from support.processes import COMMAND, PATIENCE

SECRET = "a secret of these tests alone"
PORT = 29470


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Host:
    """A network namespace."""

    name: str
    address: str
    running: list[subprocess.Popen[str]] = field(default_factory=list)
    ahead: int = 0
    """Seconds by which its clock is ahead of that of hosts with 0."""

    def enter(self) -> list[str]:
        """What a command on this host begins with."""
        clock = ["unshare", "--time", "--monotonic", str(self.ahead), "--fork", "--kill-child"] if self.ahead else []
        return [*clock, "ip", "netns", "exec", self.name]

    def start(
        self, *arguments: str | Path, command: Sequence[str] = (), within: Path | None = None, **environment: str
    ) -> subprocess.Popen[str]:
        """Start flockstep, or another command, on this host, in the folder `within`."""
        process = subprocess.Popen(
            [*self.enter(), *(command or COMMAND), *map(str, arguments)],
            cwd=within,
            env={**os.environ, "FLOCKSTEP_SECRET": SECRET, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def sent(self, card: str) -> int:
        """Bytes that have left by that network card, "lo" or "eth0"."""
        command = [*self.enter(), "cat", f"/sys/class/net/{card}/statistics/tx_bytes"]
        return int(subprocess.run(command, check=True, capture_output=True).stdout)

    def cut(self) -> None:
        """Take its cable out."""
        ip("-n", self.name, "link", "set", "eth0", "down")

    def processes(self) -> list[int]:
        """The processes that run on this host."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True).stdout
        return [int(line) for line in listed.split()]


@contextmanager
def network(count: int, bandwidth: str | None = None) -> Iterator[list[Host]]:
    """So many hosts, each with a card eth0 on one bridge, which is in a namespace of its own; every card sends and
    receives at most `bandwidth`.
    """
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need Linux, root and ip")
    switch = f"fsw{os.getpid()}"
    hosts = [Host(f"fsh{os.getpid()}n{number}", f"10.77.0.{number + 1}") for number in range(count)]
    try:
        try:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
            for number, host in enumerate(hosts):
                ip("netns", "add", host.name)
                port = f"port{number}"
                ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
                ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
                ip("-n", host.name, "link", "set", "eth0", "up")
                ip("-n", host.name, "link", "set", "lo", "up")
                if bandwidth is not None:
                    shape(switch, port, units.bandwidth(bandwidth))
                    shape(host.name, "eth0", units.bandwidth(bandwidth))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr.decode().strip()}")
        yield hosts
    finally:
        for host in hosts:
            for process in host.running:
                if process.poll() is None:
                    process.kill()
                process.communicate()
        for name in (switch, *(host.name for host in hosts)):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def shape(name: str, card: str, rate: float) -> None:
    """Limit what a card sends, in bytes per second; bursts last a millisecond, nothing is dropped."""
    burst = max(namespaces.PACKETS, round(rate / 1000))
    limit = ["rate", f"{round(8 * rate)}bit", "burst", str(burst), "latency", namespaces.BUFFER]
    ip("netns", "exec", name, "tc", "qdisc", "add", "dev", card, "root", "tbf", *limit)


def on_all(hosts: Sequence[Host], *arguments: str | Path, first: Sequence[str | Path] = ()) -> list[Ended]:
    """Run the same flockstep command on every host, `first` in addition on the coordinator; what came of each."""
    where = ["--nodes", str(len(hosts)), "--coordinator", f"{hosts[0].address}:{PORT}"]
    processes = []
    for rank in reversed(range(len(hosts))):  # those that join wait for the coordinator
        command, *rest = arguments
        own = [command, *where, "--node-rank", str(rank), *(first if rank == 0 else ()), *rest]
        processes.append(hosts[rank].start(*own))
    return [Ended.of(process) for process in reversed(processes)]


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @classmethod
    def of(cls, process: subprocess.Popen[str]) -> Ended:
        """Wait for its end."""
        out, err = process.communicate(timeout=PATIENCE)
        return cls(process.returncode, out, err)
