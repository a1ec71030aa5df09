"""Several hosts on this machine: each has a name, a network card, processes, and shared memory of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.processes import PATIENCE, alive, content, wait_until

NETWORK = "10.77.0"
TOOLS = ("ip", "unshare", "nsenter", "setpriv", "mount", "hostname")
SET_UP = """
set -e
hostname {name}
mount --bind {hosts} /etc/hosts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
ip link set lo up
touch {ready}
exec sleep infinity
"""
"""First process of a host, with which all others end."""


@dataclass(frozen=True)
class Host:
    """A host: its first process ends with the test's process, and the kernel ends the others with the first."""

    name: str
    address: str
    first: int
    """Process id of the host's first process, as seen from outside."""
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, *words: str) -> list[str]:
        """The command that carries out `words` on this host, in the working folder of its caller."""
        inside = ["nsenter", "-t", str(self.first), "-m", "-u", "-n", "-p", f"--wdns={Path.cwd()}"]
        return [*inside, *words]

    def run(self, *words: str, seconds: float = PATIENCE) -> str:
        """Carry out `words` on this host, and return standard output; fail if the command does."""
        done = subprocess.run(self.command(*words), check=False, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def ended(self, *words: str) -> tuple[int, str]:
        """Carry out `words` on this host; return the exit code, and what was printed."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(self.command(*words), check=False, timeout=PATIENCE, **pipes)  # type: ignore[call-overload]
        return done.returncode, done.stdout

    def processes(self) -> list[str]:
        """Names of the processes that run on this host, sorted."""
        listed = [line.split() for line in self.run("ps", "-e", "-o", "stat=,comm=").splitlines()]
        return sorted(name for state, name, *_ in listed if state[0] != "Z" and name != "ps")

    def start(self, output: Path, *words: str) -> None:
        """Start a daemon, which ends with the host; what it says is written to the file `output`."""
        with output.open("wb") as out:
            one = subprocess.Popen(self.command(*words), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        self.daemons.append(one)


def lacking(tools: Sequence[str] = TOOLS) -> str:
    """Why this machine can have no hosts in namespaces; empty if it can."""
    missing = [tool for tool in tools if not shutil.which(tool)]
    if sys.platform != "linux" or os.geteuid():
        return "hosts in namespaces need Linux and root"
    if missing:
        return f"not installed: {', '.join(missing)}"
    done = subprocess.run(["unshare", "-m", "-u", "-n", "-p", "--fork", "true"], check=False, capture_output=True)
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.decode().strip()}"


@contextmanager
def connected(folder: Path, *names: str) -> Iterator[tuple[Host, ...]]:
    """Hosts of these names in one network, where each name resolves; the first host holds the bridge.

    The machine itself stays as it is: when the hosts' first processes end, their processes, cards and mounts do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    addresses = [f"{NETWORK}.{number}" for number in range(1, len(names) + 1)]
    known = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *known]))
    holders: list[subprocess.Popen[bytes]] = []
    hosts: list[Host] = []
    try:
        for name, address in zip(names, addresses, strict=True):
            holders.append(_started(folder, name))
            hosts.append(Host(name, address, _inner(holders[-1])))
        for name in names:
            wait_until((folder / f"{name}.ready").exists, PATIENCE, f"host {name}: {content(folder / f'{name}.err')!r}")
        _cabled(hosts)
        yield tuple(hosts)
    finally:
        for holder in holders:
            holder.kill()
        for one in [*holders, *(daemon for host in hosts for daemon in host.daemons)]:
            one.wait()
        wait_until(lambda: not any(alive(host.first) for host in hosts), PATIENCE, "the end of all hosts")


def _started(folder: Path, name: str) -> subprocess.Popen[bytes]:
    script = SET_UP.format(name=name, hosts=folder / "hosts", ready=folder / f"{name}.ready")
    own = ["unshare", "-m", "-u", "-n", "-p", "--fork", "--kill-child=SIGKILL", "--mount-proc", "sh", "-c", script]
    with (folder / f"{name}.err").open("wb") as err:
        command = ["setpriv", "--pdeathsig", "KILL", "--", *own]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=err, start_new_session=True)


def _inner(holder: subprocess.Popen[bytes]) -> int:
    """Process id of what `unshare` has forked into the new namespaces."""
    wait_until(lambda: _children(holder) or holder.poll() is not None, PATIENCE, "a process in new namespaces")
    assert holder.poll() is None, "unshare ended"
    return _children(holder)[0]


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in content(f"/proc/{process.pid}/task/{process.pid}/children").split()]


def _cabled(hosts: Sequence[Host]) -> None:
    first, *others = hosts
    first.run("ip", "link", "add", "hub", "type", "bridge")
    first.run("ip", "addr", "add", f"{first.address}/24", "dev", "hub")
    first.run("ip", "link", "set", "hub", "up")
    for number, host in enumerate(others):
        ends = [f"to{number}", "type", "veth", "peer", "card", "netns", str(host.first)]
        subprocess.run(["nsenter", "-t", str(first.first), "-n", "ip", "link", "add", *ends], check=True)
        first.run("ip", "link", "set", f"to{number}", "master", "hub", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "card")
        host.run("ip", "link", "set", "card", "up")
