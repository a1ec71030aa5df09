"""Hosts of the benchmarks: network namespaces on one bridge, each with a card of limited bandwidth. Linux, root."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flockstep.launchers import namespaces
from flockstep.simulation import units

PORT, OTHER_PORT = 29400, 29500
"""Of flockstep's coordinator, and of the store of torch.distributed."""
SECRET = os.urandom(32).hex()


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    address: str

    def start(self, arguments: Sequence[str | Path], **environment: str) -> subprocess.Popen[str]:
        """Start a Python program on this host; its output is this program's."""
        command = ["ip", "netns", "exec", self.name, sys.executable, *map(str, arguments)]
        return subprocess.Popen(command, env={**os.environ, "FLOCKSTEP_SECRET": SECRET, **environment}, text=True)


def ip(*arguments: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *arguments], check=True)  # noqa: S607 - iproute2 lies in different folders


@contextmanager
def network(count: int, bandwidth: str | None) -> Iterator[list[Host]]:
    """So many hosts; every card sends and receives at most `bandwidth`, None: as fast as this machine can."""
    namespaces.require()
    switch = f"fsbench{os.getpid()}"
    hosts = [Host(f"{switch}n{number}", f"10.78.0.{number + 1}") for number in range(count)]
    for name in (switch, *(host.name for host in hosts)):
        ip("netns", "add", name)
    try:
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, host in enumerate(hosts):
            port = f"port{number}"
            ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
            ip("-n", host.name, "link", "set", "lo", "up")
            if bandwidth is not None:
                for name, card in ((switch, port), (host.name, "eth0")):
                    shape(name, card, units.bandwidth(bandwidth))
        yield hosts
    finally:
        for name in (switch, *(host.name for host in hosts)):
            ip("netns", "del", name)


def shape(name: str, card: str, rate: float) -> None:
    """Limit what a card sends, in bytes per second; bursts last a millisecond, nothing is dropped."""
    burst = max(namespaces.PACKETS, round(rate / 1000))
    limit = ["rate", f"{round(8 * rate)}bit", "burst", str(burst), "latency", namespaces.BUFFER]
    ip("netns", "exec", name, "tc", "qdisc", "add", "dev", card, "root", "tbf", *limit)
