"""Several hosts on one machine: each process in a network namespace of its own, with a link of limited bandwidth."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.simulation import units
from flockstep.transports.base import Transport

_NEW_NETWORK = 0x40000000
_BRIDGE = re.compile(r"fs[0-9]+")
_HOST = re.compile(r"\bfs[0-9]+c[0-9]+\s+inet\s+([0-9.]+)/")
ADDRESS = "02:00:00:00:00:01"
"""Of the bridge. Without one it takes that of a card, and changes it with every host that joins: what the first ones
send then gets lost for a while."""
BUFFER = "5s"
"""How long a packet may wait in a link's queue before it is dropped: no link loses what was sent."""
PACKETS = 3200
"""Bytes of two packets."""
TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "tcp_limit_output_bytes": "65536"}
"""On every host, whatever this machine has: windows grow until a link is full, and are kept between steps; connections
take turns at a card."""


@dataclass(frozen=True)
class Namespaces(Transport):
    """TCP between network namespaces: every process is a host with a network card of `bandwidth` in each direction.

    A bridge joins the hosts; the process that supervises the run is on it too, without a limit of its own. Linux, as
    root; the namespaces and links are gone with their processes.
    """

    bandwidth: str = "1gbit"

    def __post_init__(self) -> None:
        units.bandwidth(self.bandwidth)

    def listen(self, directory: Path, name: str) -> str:
        """Any free port of this host, which the first call in a process makes: the supervisor's makes the bridge."""
        if (here := _address_here()) is not None:  # a mover's sockets, beside those of the process
            return f"tcp://{here}:*"
        bridge = directory / "bridge"
        if not bridge.exists():
            return f"tcp://{_make_bridge(bridge)}.1:*"
        label, subnet, supervisor = bridge.read_text().split()
        number = _claim(directory)
        self._enter(label, f"{subnet}.{number}", number, int(supervisor))
        return f"tcp://{subnet}.{number}:*"

    def clean_up(self, directory: Path) -> None:
        """Take the bridge away, and its links: those of namespaces that go later would be in the next run's way."""
        bridge = _label(os.getpid())
        if _exists(bridge):
            ends = [end.name for end in Path("/sys/class/net", bridge, "brif").glob("*")]
            for link in (*ends, bridge):
                with contextlib.suppress(ConfigurationError):  # it went with its namespace meanwhile
                    _run(["ip", "link", "del", link])

    def _enter(self, label: str, host: str, number: int, supervisor: int) -> None:
        """Move this process into a new namespace, and join that to the bridge."""
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            raise ConfigurationError(f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}; be root")
        outer, inner = f"{label}h{number}", f"{label}c{number}"
        outside = ["nsenter", f"--net=/proc/{supervisor}/ns/net"]
        limit = ["root", "tbf", "rate", f"{round(8 * units.bandwidth(self.bandwidth))}bit", "burst", self._burst]
        limit += ["latency", BUFFER]
        _run([*outside, "ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", str(os.getpid())])
        _run([*outside, "ip", "link", "set", outer, "master", label, "up"])
        _run([*outside, "tc", "qdisc", "add", "dev", outer, *limit])
        _run(["ip", "addr", "add", f"{host}/24", "dev", inner])
        _run(["ip", "link", "set", inner, "up"])
        _run(["ip", "link", "set", "lo", "up"])
        _run(["tc", "qdisc", "add", "dev", inner, *limit])
        for name, value in TCP.items():
            Path("/proc/sys/net/ipv4", name).write_text(value)

    @property
    def _burst(self) -> str:
        """A millisecond's worth of bytes: more would let messages pass faster than the link; with less, from 500 Mbit/s
        on, the kernel has to cut up every segment, which is all that it can do.
        """
        return str(max(PACKETS, round(units.bandwidth(self.bandwidth) / 1000)))


def require() -> None:
    """Refuse where there can be no namespaces.

    Raises:
        ConfigurationError: not on Linux, not as root, or a command is missing.
    """
    if sys.platform != "linux" or os.geteuid() or not all(map(shutil.which, ("ip", "tc", "nsenter"))):
        raise ConfigurationError(
            "namespaces need Linux, root, and the commands ip, tc and nsenter; use --transport tcp for one host"
        )


def _make_bridge(bridge: Path) -> str:
    """A bridge in this namespace; the first three numbers of its addresses."""
    require()
    for left in Path("/sys/class/net").glob("fs*"):  # by a supervisor that was killed
        ours, used = _BRIDGE.fullmatch(left.name), any(left.glob("brif/*"))
        if ours and not used and not Path("/proc", left.name[2:]).exists():
            with contextlib.suppress(ConfigurationError):  # somebody else may be at it
                _run(["ip", "link", "del", left.name])
    label, subnet = _label(os.getpid()), f"10.{64 + os.getpid() % 190}.{os.getpid() // 190 % 250}"
    if not _exists(label):
        _run(["ip", "link", "add", label, "address", ADDRESS, "type", "bridge"])
        _run(["ip", "addr", "add", f"{subnet}.1/24", "dev", label])
        _run(["ip", "link", "set", label, "up"])
    bridge.write_text(f"{label} {subnet} {os.getpid()}")
    return subnet


def _address_here() -> str | None:
    """The address of this process's host, if it is in a namespace of a run already."""
    if shutil.which("ip") is None:
        return None
    found = _HOST.search(_run(["ip", "-4", "-o", "addr"]))
    return None if found is None else found[1]


def _label(supervisor: int) -> str:
    return f"fs{supervisor}"


def _exists(label: str) -> bool:
    return Path("/sys/class/net", label).exists()


def _claim(directory: Path) -> int:
    """A number for this host that no other one of the run has."""
    for number in range(2, 255):
        try:
            os.close(os.open(directory / f"host{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return number
    raise ConfigurationError("a run has at most 253 hosts in namespaces; use fewer workers")


def _run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigurationError(f"{' '.join(command)}: {done.stderr.strip()}; be root, on a machine that allows it")
    return done.stdout
