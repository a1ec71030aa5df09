"""Several hosts on one machine, and the commands that run on them.

Each host has a name, a network card, and shared memory of its own, and process ids of its own where daemons need them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flockstep.simulation import units
from flockstep_lab import namespaces
from support.commands import Process
from support.processes import COMMAND, PATIENCE, SCRIPTS, TORCH, alive, content, forker, wait_until

SECRET = "a secret of these tests alone"
PORT = 29470
NETWORK = "10.77.0"
SWITCH = "switch"
"""Name of the namespace that holds the bridge between the hosts."""
TOOLS = ("ip", "tc", "unshare", "nsenter", "setpriv", "mount", "hostname")
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
"""First process of a host."""


@dataclass
class Host:
    """A host, whose first process ends with the test's process."""

    name: str
    address: str
    first: int
    """Process id of the host's first process, as seen from outside."""
    process_ids: bool
    """Whether process ids are the host's own; the kernel ends all processes of such a host with the first one."""
    running: list[Process] = field(default_factory=list)
    scratch: list[Path] = field(default_factory=list)
    """Folders of the commands that were forked."""
    ahead: int = 0
    """Seconds by which the clock of the host is ahead of the clock of hosts with 0."""

    def command(self, *words: str) -> list[str]:
        """The command that carries out `words` on this host, in the working folder of its caller.

        Where process ids are the host's own, the command is a child of the process that is started.
        """
        clock = ["unshare", "--time", "--monotonic", str(self.ahead), "--fork", "--kill-child"] if self.ahead else []
        inside = ["nsenter", "-t", str(self.first), "-m", "-u", "-n", *(["-p"] if self.process_ids else [])]
        return [*clock, *inside, f"--wdns={Path.cwd()}", *words]

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

    def start(
        self,
        *arguments: str | Path,
        command: Sequence[str] = (),
        within: Path | None = None,
        program: str = COMMAND[-1],
        torch: bool = False,
        **environment: str,
    ) -> Process:
        """Start flockstep, or another command or Python `program`, on this host, in the folder `within`.

        A program is forked from a process that has done the imports of flockstep, and with `torch` those of PyTorch,
        unless the host has process ids or a clock of its own.
        """
        folder, own = Path.cwd() if within is None else within, {"FLOCKSTEP_SECRET": SECRET, **environment}
        if not (command or self.process_ids or self.ahead):
            forked = self._forked(program, list(map(str, arguments)), own, folder, torch)
            if forked is not None:
                return forked
        words = ["env", "-C", str(folder), *(command or [*COMMAND[:-1], program]), *map(str, arguments)]
        return self._started(words, own, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def _forked(
        self, program: str, arguments: list[str], environment: dict[str, str], folder: Path, torch: bool
    ) -> Process | None:
        self.scratch.append(Path(tempfile.mkdtemp(prefix="fs-")))
        for name in ("out", "err"):
            (self.scratch[-1] / name).touch()
        own = {**os.environ, **environment, "TMPDIR": str(self.scratch[-1])}
        ours = forker(TORCH if torch else SCRIPTS)  # commands on hosts load the kernels for sums in shared memory
        process = ours.fork(program, arguments, own, self.scratch[-1], folder=folder, host=self.first)
        self.running += [] if process is None else [process]
        return process

    def attach(self, *words: str | Path, **environment: str) -> Process:
        """Start a command on this host whose output is the output of this process."""
        return self._started([*map(str, words)], {"FLOCKSTEP_SECRET": SECRET, **environment})

    def daemon(self, output: Path, *words: str) -> None:
        """Start a daemon, which ends with the host; its output is written to the file `output`."""
        with output.open("wb") as out:
            self._started([*words], {}, stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def _started(self, words: list[str], environment: dict[str, str], **files: object) -> Process:
        own = {**os.environ, **environment}
        process = subprocess.Popen(self.command(*words), env=own, text=True, **files)  # type: ignore[call-overload]
        self.running.append(process)
        return process  # type: ignore[no-any-return]

    def sent(self, card: str) -> int:
        """Bytes that have left by that network card, "lo" or "eth0"."""
        (line,) = [
            line for line in self.run("cat", "/proc/net/dev").splitlines() if line.strip().startswith(f"{card}:")
        ]
        return int(line.split()[9])

    def cut(self) -> None:
        """Take the network cable out."""
        self.run("ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Put the network cable in again."""
        self.run("ip", "link", "set", "eth0", "up")

    def mute(self, other: Host) -> None:
        """Let no packet of this host reach another one, whose packets still arrive here."""
        nobody = ["lladdr", "02:00:00:00:00:77", "nud", "permanent"]
        self.run("ip", "neigh", "replace", other.address, "dev", "eth0", *nobody)

    def unmute(self, other: Host) -> None:
        """Let packets reach the other host again."""
        self.run("ip", "neigh", "del", other.address, "dev", "eth0")

    def processes(self) -> list[str]:
        """Names of the processes that run on this host, besides its first one, sorted."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended
                if (folder / "ns/net").readlink() == self._network and int(folder.name) != self.first:
                    found.append((folder / "comm").read_text().strip())
        return sorted(found)

    @property
    def _network(self) -> Path:
        return Path(f"/proc/{self.first}/ns/net").readlink()


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
def network(count: int, bandwidth: str | None = None) -> Iterator[list[Host]]:
    """So many hosts, or a skipped test where this machine allows none; see `connected`."""
    if reason := lacking():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory() as folder:
        names = [f"host{number}" for number in range(count)]
        with connected(Path(folder), *names, bandwidth=bandwidth, process_ids=False) as hosts:
            yield list(hosts)


@contextmanager
def connected(
    folder: Path, *names: str, bandwidth: str | None = None, process_ids: bool = True
) -> Iterator[tuple[Host, ...]]:
    """Hosts of these names in one network, where each name resolves; every card eth0 sends and receives at most
    `bandwidth`.

    The machine itself stays as it is: when the hosts' processes end, their cards, mounts and the bridge do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    addresses = [f"{NETWORK}.{number}" for number in range(1, len(names) + 1)]
    known = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
    (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *known]))
    holders: list[subprocess.Popen[bytes]] = []
    hosts: list[Host] = []
    try:
        for name, address in zip([*names, SWITCH], [*addresses, ""], strict=True):
            holders.append(_holder(folder, name, process_ids))
            first = _child(holders[-1]) if process_ids else holders[-1].pid
            hosts.append(Host(name, address, first, process_ids))
        for host in hosts:
            ready, err = folder / f"{host.name}.ready", folder / f"{host.name}.err"
            wait_until(ready.exists, PATIENCE, f"host {host.name}: {content(err)!r}")
        _cable(hosts[-1], hosts[:-1], bandwidth)
        yield tuple(hosts[:-1])
    finally:
        _end(holders, hosts)


def _end(holders: Sequence[subprocess.Popen[bytes]], hosts: Sequence[Host]) -> None:
    running = [process for host in hosts for process in host.running]
    for process in [*holders, *running]:
        if process.poll() is None:
            process.kill()
    for process in running:
        process.communicate()
    for holder in holders:
        holder.wait()
    wait_until(lambda: not any(alive(host.first) for host in hosts), PATIENCE, "the end of all hosts")
    for folder in (folder for host in hosts for folder in host.scratch):
        shutil.rmtree(folder, ignore_errors=True)


def _holder(folder: Path, name: str, process_ids: bool) -> subprocess.Popen[bytes]:
    """Start the first process of a host; with process ids of its own, that is a child of the process returned."""
    script = SET_UP.format(name=name, hosts=folder / "hosts", ready=folder / f"{name}.ready")
    forked = ["-p", "--fork", "--kill-child=SIGKILL", "--mount-proc"] if process_ids else []
    with (folder / f"{name}.err").open("wb") as err:
        command = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "-m", "-u", "-n", *forked, "sh", "-c", script]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=err, start_new_session=True)


def _child(holder: subprocess.Popen[bytes]) -> int:
    """Process id of what `unshare` has forked into the new namespaces."""
    wait_until(lambda: _children(holder) or holder.poll() is not None, PATIENCE, "a process in new namespaces")
    assert holder.poll() is None, "unshare ended"
    return _children(holder)[0]


def _children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in content(f"/proc/{process.pid}/task/{process.pid}/children").split()]


def _cable(switch: Host, hosts: Sequence[Host], bandwidth: str | None) -> None:
    """Connect every host's card to a bridge in the namespace `switch`."""
    switch.run("ip", "link", "add", "bridge", "address", namespaces.ADDRESS, "type", "bridge")
    switch.run("ip", "link", "set", "bridge", "up")
    for number, host in enumerate(hosts):
        ends = [f"port{number}", "type", "veth", "peer", "eth0", "netns", str(host.first)]
        subprocess.run(["nsenter", "-t", str(switch.first), "-n", "ip", "link", "add", *ends], check=True)
        switch.run("ip", "link", "set", f"port{number}", "master", "bridge", "up")
        host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        if bandwidth is not None:
            for end, device in ((switch, f"port{number}"), (host, "eth0")):
                for command in namespaces.limit(device, units.bandwidth(bandwidth)):
                    end.run(*command)


def on_all(
    hosts: Sequence[Host],
    *arguments: str | Path,
    first: Sequence[str | Path] = (),
    seconds: float = PATIENCE,
    torch: bool = False,
) -> list[Ended]:
    """Run the same flockstep command on every host, `first` in addition on the coordinator; what came of each.

    `torch` says that its processes use PyTorch.
    """
    where = ["--nodes", str(len(hosts)), "--coordinator", f"{hosts[0].address}:{PORT}"]
    processes = []
    for rank in reversed(range(len(hosts))):  # those that join wait for the coordinator
        command, *rest = arguments
        own = [command, *where, "--node-rank", str(rank), *(first if rank == 0 else ()), *rest]
        processes.append(hosts[rank].start(*own, torch=torch))
    return [Ended.of(process, seconds) for process in reversed(processes)]


@dataclass
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @classmethod
    def of(cls, process: Process, seconds: float = PATIENCE) -> Ended:
        """Wait for its end."""
        out, err = process.communicate(timeout=seconds)
        return cls(process.returncode, out, err)


def require(ended: Sequence[Ended], *codes: int) -> None:
    """Check with which codes commands have ended."""
    assert [one.code for one in ended] == list(codes), "\n".join(one.err for one in ended)


def require_idle(hosts: Sequence[Host]) -> None:
    """Wait until no process runs on the hosts any more: some of a run end after its command."""
    wait_until(lambda: not any(host.processes() for host in hosts), PATIENCE, "the end of all processes")


def summary(folder: Path) -> dict[str, Any]:
    """The summary of a run, as it is in its folder."""
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found
