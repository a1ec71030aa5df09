"""The agent of a host on which torchrun, mpirun or srun has started the processes; see `flockstep.runtime.adoption`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flockstep import __version__
from flockstep.errors import ConfigurationError, FlockstepError, Interrupted, RunError
from flockstep.launchers.children import ENDED, Child
from flockstep.launchers.gathering import BETWEEN_HOSTS, HEARTBEAT, settings_of
from flockstep.launchers.host_agent import HostAgent, on_host
from flockstep.launchers.host_messages import Accepted, Join
from flockstep.launchers.hosts import ExpectedHosts, OtherHosts
from flockstep.launchers.meeting import Meeting, meeting_at, read_secret
from flockstep.launchers.script import supervise
from flockstep.launchers.wait_monitor import Reminder, on_stderr
from flockstep.links.kinds import Transport
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.runtime.adoption import Answer, Introduction, folder_of
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.place import COORDINATOR, Place
from flockstep.system import ENDING

LONGEST = 1 << 12
"""Maximum size in bytes of the message with which a process introduces itself."""


class Adopted:
    """A process on this host that a launcher has started, treated as a child of the run."""

    reason: str | None = None

    def __init__(self, sock: socket.socket, introduction: Introduction):
        self.pid = introduction.process
        self.rank = introduction.rank
        self._socket = sock
        self._code: int | None = None
        self._answered = False
        with contextlib.suppress(ProcessLookupError):
            self._process = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    def begin(self, node_spec: NodeSpec) -> Child:
        """Send the process its node specification, with which it joins the run.

        The process does not end with the agent: the process with local rank 0 waits for the agent's end.
        """
        self._answer(Answer(spec=dataclasses.replace(node_spec, supervisor=0)))
        return self

    def refuse(self, error: FlockstepError) -> None:
        """Tell the process why the run cannot begin, unless the run has begun."""
        if not self._answered:
            self._answer(Answer(kind=type(error).__name__, reason=str(error)))

    def _answer(self, answer: Answer) -> None:
        self._answered = True
        with contextlib.suppress(OSError):  # it has ended, which is noticed
            self._socket.setblocking(True)
            self._socket.sendall(msgspec.json.encode(answer) + b"\n")

    def exit_code(self) -> int | None:
        """Return the exit code that the process has reported, 0 or 1; `ENDED` if the process ended without a report;
        None while the process runs.
        """
        if self._code is None:
            ended = bool(self._process is not None and select.select([self._process], [], [], 0)[0])
            with contextlib.suppress(BlockingIOError):
                try:
                    self._socket.setblocking(False)
                    said = self._socket.recv(1)
                except ConnectionResetError:
                    said = b""
                self._code = int(said) if said in (b"0", b"1") else ENDED
            if ended and self._code is None:
                self._code = ENDED
        return self._code

    def kill(self) -> None:
        """End the process at once, if it runs."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Adopter:
    """Coordinates a run for processes that another launcher has started on this host, or takes part in such a run that
    another host coordinates.
    """

    place: Place
    """Place of the process that started the agent among the processes that the launcher has started."""
    script: str
    """Path of the script that the processes run."""
    timeout: float
    """Seconds within which all hosts must have joined."""
    folder: Callable[[None, str], Path]
    """Function that receives (None, name of the run) and returns a new folder for the record of the run."""

    @property
    def config(self) -> RunConfig:
        """Configuration of the run whose processes torchrun, mpirun or srun has started."""
        return RunConfig(
            kind="launch",
            job=self.script,
            strategy="as the script says",
            workers=self.place.workers,
            transport="shared_memory" if self.place.all_here else BETWEEN_HOSTS,
        )

    def run(self, processes: Mapping[int, Adopted]) -> None:
        """Coordinate the run, or take part in a run that another host coordinates, until the run ends.

        Raises:
            ConfigurationError: the run cannot begin.
            RunError: the run failed.
        """
        if self.place.all_here:
            self._coordinate(processes, self.config, OtherHosts())
            return
        meeting = self._meeting()
        node = min(processes) if self.place.node_rank is None else self.place.node_rank
        nodes = self.place.nodes or self.place.workers  # without numbers of hosts, each has that of its lowest rank
        if node > 0:
            self._join(processes, meeting, node, nodes)
            return
        config, own = self.config, sorted(processes)
        here = on_host(Transport.parse(BETWEEN_HOSTS), meeting.address())
        expected = ExpectedHosts(range(1, nodes), None, config.workers, settings_of(config), own=own)
        with OtherHosts(meeting, expected, config.to_toml(), HEARTBEAT) as hosts:
            self._coordinate(processes, dataclasses.replace(config, transport=str(here)), hosts)

    def _meeting(self) -> Meeting:
        if self.place.coordinator is None:
            raise ConfigurationError(
                f"{self.place.by} does not tell which host runs rank 0; pass {COORDINATOR}=HOST:PORT, with an address "
                "of that host and a free port there, and FLOCKSTEP_SECRET to every process (Open MPI: -x NAME; "
                "MPICH: -genv NAME VALUE)"
            )
        return meeting_at(self.place.coordinator, read_secret(None), self.timeout)

    def _coordinate(self, processes: Mapping[int, Adopted], config: RunConfig, hosts: OtherHosts) -> None:
        place = self.folder(None, f"launch-{Path(self.script).stem}")
        record = RunFolder(place)
        try:
            with record.created(config, False):
                supervise(lambda node_spec: processes[node_spec.address].begin(node_spec), config, record, hosts)
        except FlockstepError:
            if record.begun is not None:
                on_stderr(f"the record is written to {place}")
            raise
        on_stderr(f"the record is written to {place}")

    def _join(self, processes: Mapping[int, Adopted], meeting: Meeting, node: int, nodes: int) -> None:
        config = self.config
        ranks, settings = tuple(sorted(processes)), settings_of(config)

        def begin(node_spec: NodeSpec, accepted: Accepted) -> Child:
            return processes[node_spec.address].begin(node_spec)

        HostAgent(
            meeting, Join(node, nodes, config.workers, ranks=ranks, settings=settings, watches=True), begin, HEARTBEAT
        ).run()


def adopted(listener: socket.socket, place: Place, found: dict[int, Adopted], timeout: float) -> None:
    """Wait up to `timeout` seconds until all processes of this host have introduced themselves.

    Raises:
        ConfigurationError: the processes do not belong to one run, or some did not introduce themselves in time.
        RunError: a process has ended.
    """
    listener.settimeout(0.05)
    until, reminder = time.monotonic() + timeout, Reminder()
    while len(found) < place.local_workers:
        with contextlib.suppress(TimeoutError):
            one = _introduced(listener.accept()[0], place)
            if one.rank in found:
                raise ConfigurationError(
                    f"two processes have rank {one.rank}; call flockstep.distribute in only one process per rank"
                )
            found[one.rank] = one
        for one in found.values():
            if one.exit_code() is not None:
                raise RunError(
                    f"worker {one.rank} ended before all workers of its host had joined; see the output of this worker"
                )
        missing = f"{place.local_workers - len(found)} of {place.local_workers} processes"
        if time.monotonic() > until:
            raise ConfigurationError(
                f"{missing} of this host did not join within {timeout:g} s; every process must call "
                "flockstep.distribute or flockstep.join, or give these functions a longer timeout"
            )
        reminder.remind(f"{missing} of this host; so far ranks {', '.join(map(str, sorted(found)))} have joined")


def _introduced(sock: socket.socket, place: Place) -> Adopted:
    sock.settimeout(10.0)
    data = b""
    while not data.endswith(b"\n") and len(data) < LONGEST:
        if not (chunk := sock.recv(LONGEST)):
            raise RunError("a process of this host ended before all processes of the host had joined; see its output")
        data += chunk
    words = msgspec.json.decode(data, type=Introduction)
    one = Adopted(sock, words)
    if (words.workers, words.version) != (place.workers, __version__):
        error = ConfigurationError(
            "all processes of a host must have the same version of flockstep and the same number of workers: rank "
            f"{words.rank} has flockstep {words.version} and {words.workers} workers, another process has "
            f"{__version__} and {place.workers}; start all processes by one launcher, with one Python"
        )
        one.refuse(error)
        raise error
    return one


def _stop(signum: int, frame: object) -> None:
    raise KeyboardInterrupt(f"stopped by {signal.Signals(signum).name}")


@contextlib.contextmanager
def _told(found: Mapping[int, Adopted]) -> Iterator[None]:
    """Print an error in a sentence, tell it to the processes that still wait, and exit with its code."""
    try:
        yield
    except (FlockstepError, KeyboardInterrupt, OSError) as error:
        ours = error if isinstance(error, FlockstepError) else RunError(str(error) or "interrupted")
        ours = Interrupted(str(ours)) if isinstance(error, KeyboardInterrupt) else ours
        on_stderr(str(ours))
        for one in found.values():
            one.refuse(ours)
        sys.exit(ours.exit_code)


def main(folder: Callable[[None, str], Path]) -> None:
    """Run the agent; the arguments are the descriptor of a listening Unix socket, the place as JSON, the script, and
    the seconds within which all processes must have connected.

    `folder` is a function that receives (None, name of the run) and returns a new folder for the record.
    """
    descriptor, text, script, timeout = sys.argv[1:]
    for kind in ENDING:
        signal.signal(kind, _stop)
    place = msgspec.json.decode(text, type=Place)
    found: dict[int, Adopted] = {}
    with _told(found):
        try:
            with socket.socket(fileno=int(descriptor)) as listener:
                adopted(listener, place, found, float(timeout))
        finally:
            shutil.rmtree(folder_of(place), ignore_errors=True)
        Adopter(place, script, float(timeout), folder).run(found)
