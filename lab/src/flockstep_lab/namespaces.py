"""Simulates several hosts on one machine: each process runs in its own network namespace, with a link of limited
bandwidth.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.links.kinds import Transport
from flockstep.simulation import units

_NEW_NETWORK = 0x40000000
_CARD = re.compile(r"^[0-9]+: (fs([0-9]+)(?:[hc][0-9]+)?)[:@](?:.*\balias ([0-9]+))?", re.MULTILINE)
_NETWORK = re.compile(r"(?<![0-9.])[0-9]+(?:\.[0-9]+){3}(?:/[0-9]+)?")
NARROW = 4
"""Minimum length of the prefix, in bits, of a route whose addresses count as in use; shorter prefixes are default
routes or halves of them.
"""
_HOST = re.compile(r"\bfs[0-9]+c[0-9]+\s+inet\s+([0-9.]+)/")
ADDRESS = "02:00:00:00:00:01"
"""Hardware address of the bridge between the hosts. Without a fixed address, the bridge would change its address with
every host that joins, and packets would be lost for a while.
"""
BUFFER = "5s"
"""Longest time in seconds that a packet may wait in a link's queue before it is dropped; long enough that links lose no
packets.
"""
PACKETS = 3200
"""Smallest burst of a link in bytes, which is the size of two packets."""
SEGMENT = 65536
"""Largest segment in bytes that TCP hands to a network card, which is Linux's default."""
FILLED = 0.8
"""Size of a TCP segment as a fraction of the burst; the rest of the burst is for the headers of the segment's
packets.
"""
TCP = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "tcp_limit_output_bytes": "65536"}
"""TCP settings of every simulated host, whatever the settings of this machine: the windows of connections grow until a
link is full and keep their size between steps, and the connections of a host take turns at its network card.
"""


@dataclass(frozen=True)
class Namespaces(Transport):
    """TCP between network namespaces: every process counts as a host, with a network card of the given bandwidth in
    each direction.

    A bridge joins the hosts. Requires Linux and root; namespaces and links disappear with their processes.
    """

    bandwidth: str = "1gbit"

    def __post_init__(self) -> None:
        units.bandwidth(self.bandwidth)

    def prepare(self, directory: Path) -> None:
        """Create the bridge that joins the hosts."""
        _make_bridge(directory / "bridge")

    def listen(self, directory: Path, name: str) -> str:
        """Return the address of a free port on this process's host; the first call creates the host."""
        if (here := _address_here()) is not None:  # sockets of a communicator, in addition to the node's
            return f"tcp://{here}:*"
        label, subnet, supervisor = (directory / "bridge").read_text().split()
        number = _claim(directory)
        self._enter(label, f"{subnet}.{number}", number, int(supervisor))
        return f"tcp://{subnet}.{number}:*"

    def clean_up(self, directory: Path) -> None:
        """Remove the bridge and its links.

        Links whose namespaces end later would collide with the links of the next run.
        """
        if not directory.exists() or (directory / "bridge").exists():  # otherwise it is another run's
            _remove(_of(os.getpid(), _links()))

    def _enter(self, label: str, host: str, number: int, supervisor: int) -> None:
        """Move this process into a new namespace and connect the namespace to the bridge."""
        if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
            raise ConfigurationError(
                f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}; run the command as root"
            )
        outer, inner = f"{label}h{number}", f"{label}c{number}"
        outside = ["nsenter", f"--net=/proc/{supervisor}/ns/net"]
        rate = units.bandwidth(self.bandwidth)
        _run([*outside, "ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", str(os.getpid())])
        _run([*outside, "ip", "link", "set", outer, "master", label, "up"])
        for command in limit(outer, rate):
            _run([*outside, *command])
        _run(["ip", "addr", "add", f"{host}/24", "dev", inner])
        _run(["ip", "link", "set", inner, "up"])
        _run(["ip", "link", "set", "lo", "up"])
        for command in limit(inner, rate):
            _run(command)
        for name, value in TCP.items():
            Path("/proc/sys/net/ipv4", name).write_text(value)


def limit(device: str, rate: float) -> list[list[str]]:
    """Return the commands that limit a network card to sending `rate` bytes per second.

    A burst holds the bytes of one millisecond; with larger bursts, messages would pass faster than the link allows. TCP
    passes only segments that fit into a burst to the card. The kernel would split larger segments into packets and
    schedule each packet, which takes up to one core per link.
    """
    burst = max(PACKETS, round(rate / 1000))
    bucket = ["rate", f"{round(8 * rate)}bit", "burst", str(burst), "latency", BUFFER]
    return [
        ["ip", "link", "set", device, "gso_max_size", str(min(SEGMENT, round(FILLED * burst)))],
        ["tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket],
    ]


def require() -> None:
    """Check that this machine can create network namespaces.

    Raises:
        ConfigurationError: the system is not Linux, the user is not root, or a command is missing.
    """
    if sys.platform != "linux" or os.geteuid() or not all(map(shutil.which, ("ip", "tc", "nsenter"))):
        raise ConfigurationError(
            "namespaces need Linux, root, and the commands ip, tc and nsenter; to run on one host, use --transport tcp"
        )


def _make_bridge(bridge: Path) -> None:
    """Create the bridge in this namespace, and write down the first three numbers of its network, unused on this
    machine.
    """
    require()
    label = f"fs{os.getpid()}"
    sweep(_links())
    if _of(os.getpid(), _links()):
        raise ConfigurationError(
            "a process can have only one run in network namespaces at a time, got a second run; wait for the first "
            f"run to end, or, if no run is active, remove the leftover bridge with ip link del {label}"
        )
    _run(["ip", "link", "add", label, "address", ADDRESS, "type", "bridge"])
    try:
        _run(["ip", "link", "set", label, "alias", str(_started(os.getpid())), "up"])
        subnet = _take_subnet(label)
    except ConfigurationError:
        _run(["ip", "link", "del", label])
        raise
    bridge.write_text(f"{label} {subnet} {os.getpid()}")


def _take_subnet(label: str) -> str:
    """Give the bridge an address in an unused network, then check again, because another process may have taken it
    meanwhile.
    """
    routed = _run(["ip", "-4", "-o", "addr"]) + _run(["ip", "-4", "route", "show", "table", "all"])
    for subnet in free_of(routed, subnets(os.getpid())):
        address = f"{subnet}.1/24"
        _run(["ip", "addr", "add", address, "dev", label])
        others = [line for line in _run(["ip", "-4", "-o", "addr"]).splitlines() if line.split()[1] != label]
        if any(free_of("\n".join(others), (subnet,))):
            return subnet
        _run(["ip", "addr", "del", address, "dev", label])
    raise ConfigurationError(
        "namespaces need a private network of 254 addresses, and this machine routes all such networks already; use "
        "--transport tcp"
    )


def subnets(first: int) -> Iterator[str]:
    """Yield the first three bytes of the addresses of private networks, beginning at a network that `first` selects, so
    that runs rarely collide.
    """
    wide = 190 * 250
    yield from (f"10.{64 + at % 190}.{at // 190}" for at in ((first + i) % wide for i in range(wide)))
    yield from (f"172.{16 + at % 16}.{at // 16}" for at in range(16 * 256))
    yield from (f"192.168.{at}" for at in range(256))


def free_of(said: str, candidates: Iterable[str]) -> Iterator[str]:
    """Yield the candidates that overlap with no network or address in `said`, the output of the command `ip`.

    Very wide routes are ignored.
    """
    known = [ipaddress.IPv4Network(one, strict=False) for one in set(_NETWORK.findall(said))]
    known = [one for one in known if one.prefixlen >= NARROW]
    for subnet in candidates:
        own = ipaddress.IPv4Network(f"{subnet}.0/24")
        if not any(one.overlaps(own) for one in known):
            yield subnet


@dataclass(frozen=True)
class Card:
    """A network link of this namespace that was created by a run."""

    name: str
    supervisor: int
    """Process id of the run's supervisor, which is part of the name of the link."""
    started: str
    """Start time of the supervisor, stored in the bridge's name; empty for the card of a host, or if the time is
    unknown.
    """


def _links() -> list[Card]:
    return parse_links(_run(["ip", "-o", "link"]))


def parse_links(said: str) -> list[Card]:
    """Return the links of runs that appear in the output of `ip -o link`."""
    return [Card(found[1], int(found[2]), found[3] or "") for found in _CARD.finditer(said)]


def _of(supervisor: int, cards: list[Card]) -> list[Card]:
    """The links of one run, its bridge last."""
    return sorted((card for card in cards if card.supervisor == supervisor), key=lambda card: bool(card.started))


def sweep(cards: list[Card]) -> None:
    """Remove the network links of supervisors that no longer run; the start time shows whether another process now has
    the supervisor's process id.
    """
    bridges = {card.supervisor: card.started for card in cards if card.started}
    for supervisor in {card.supervisor for card in cards}:
        now = _started(supervisor)
        if now is None or bridges.get(supervisor, now) != now:
            _remove(_of(supervisor, cards))


def _remove(cards: list[Card]) -> None:
    for card in cards:
        with contextlib.suppress(ConfigurationError):  # it is gone or being removed
            _run(["ip", "link", "del", card.name])


def _started(process: int) -> str | None:
    """Start time of a process in the kernel's ticks; None if the process does not exist or has ended."""
    try:
        fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _address_here() -> str | None:
    """The address of this process's host if the process is in a namespace of a run; otherwise None."""
    if shutil.which("ip") is None:
        return None
    found = _HOST.search(_run(["ip", "-4", "-o", "addr"]))
    return None if found is None else found[1]


def _claim(directory: Path) -> int:
    """Reserve a host number that no other process of the run has."""
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
        raise ConfigurationError(
            f"the command {' '.join(command)} failed: {done.stderr.strip()}; run as root, on a machine that "
            "allows network namespaces"
        )
    return done.stdout
