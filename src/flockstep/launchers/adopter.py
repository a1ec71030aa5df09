"""The agent of a host on which torchrun, mpirun or srun has started the processes; see `flockstep.runtime.adoption`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from flockstep import __version__
from flockstep.errors import ConfigurationError, FlockstepError, Interrupted, ProtocolError, RunError
from flockstep.frameworks.job import train_instead
from flockstep.launchers.children import ENDED, Child
from flockstep.launchers.executable import Executable
from flockstep.launchers.gathering import BETWEEN_HOSTS, HEARTBEAT, settings_of
from flockstep.launchers.host_agent import HostAgent, on_host
from flockstep.launchers.host_messages import Join
from flockstep.launchers.hosts import ExpectedHosts, OtherHosts
from flockstep.launchers.meeting import meeting_at, read_secret
from flockstep.launchers.run import SupervisedRun
from flockstep.launchers.wait_monitor import Reminder, on_stderr
from flockstep.links.control import Control, LocalFrames
from flockstep.links.kinds import Transport
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.runtime.adoption import CRASHED, Answer, Introduction, folder_of
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.place import COORDINATOR, Place
from flockstep.system import ENDING


class Adopted:
    """A process on this host that a launcher has started, treated as a child of the run."""

    reason: str | None = None

    def __init__(self, connection: LocalFrames, introduction: Introduction):
        self.pid = introduction.process
        self.rank = introduction.rank
        self.replicas = introduction.replica_size, introduction.replica_over_hosts
        """Number of processes of a replica, and whether they may run on several hosts."""
        self.connection = connection
        self._code: int | None = None
        self._answered = False
        self._process = None
        with contextlib.suppress(ProcessLookupError):  # its connection shows that it has ended
            if hasattr(os, "pidfd_open"):
                self._process = os.pidfd_open(self.pid)

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
        self.connection.send([msgspec.json.encode(answer)])

    def exit_code(self) -> int | None:
        """Return the exit code that the process has reported, 0 or 1; `ENDED` if the process ended without a report;
        None while the process runs.
        """
        if self._code is None:
            with contextlib.suppress(ProtocolError):
                if (said := self.connection.receive(0)) is not None:
                    self._code = int(bytes(said[0]) == CRASHED)
            # A child that the process has forked may keep the connection open.
            ended = self._process is not None and bool(wait([self._process], 0))
            if self._code is None and (ended or self.connection.ended):
                self._code = ENDED
        return self._code

    def kill(self) -> None:
        """End the process at once, if it runs."""
        if self.exit_code() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def run(place: Place, script: str, timeout: float, record: Path, processes: Mapping[int, Adopted]) -> None:
    """Coordinate a run for processes that another launcher has started on this host, or take part in such a run that
    another host coordinates, until the run ends.

    Args:
        place: place of the process that started the agent among the processes that the launcher has started.
        script: path of the script that the processes run.
        timeout: seconds within which all hosts must have joined.
        record: new folder for the record of the run, if this host coordinates it.
        processes: rank → process of this host.

    Raises:
        ConfigurationError: the run cannot begin.
        RunError: the run failed.
    """
    transport = "shared_memory" if place.all_here else BETWEEN_HOSTS
    size, over_hosts = next(iter(processes.values())).replicas
    config = RunConfig(
        kind="launch",
        job=script,
        strategy="as the script says",
        workers=place.workers,
        transport=transport,
        replica_size=size if size > 1 else None,
        replica_over_hosts=over_hosts or None,
    )
    with contextlib.ExitStack() as stack:
        hosts = OtherHosts()
        if not place.all_here:
            if place.coordinator is None:
                raise ConfigurationError(
                    f"{place.by} does not tell which host runs rank 0; pass {COORDINATOR}=HOST:PORT, with an address "
                    "of that host and a free port there, and FLOCKSTEP_SECRET to every process (Open MPI: -x NAME; "
                    "MPICH: -genv NAME VALUE)"
                )
            meeting = meeting_at(place.coordinator, read_secret(None), timeout)
            ranks, settings = tuple(sorted(processes)), settings_of(config)
            # Without numbers of hosts, each has that of its lowest rank.
            node, nodes = ranks[0] if place.node_rank is None else place.node_rank, place.nodes or place.workers
            if node > 0:
                join = Join(node, nodes, place.workers, ranks=ranks, settings=settings, watches=True)
                HostAgent(meeting, join, lambda spec, _: processes[spec.address].begin(spec), HEARTBEAT).run()
                return
            expected = ExpectedHosts(
                range(1, nodes),
                None,
                place.workers,
                settings,
                own=ranks,
                replica_size=config.processes_of_replica,
                together=config.processes_together,
            )
            hosts = stack.enter_context(OtherHosts(meeting, expected, config.to_toml(), HEARTBEAT))
            here = on_host(Transport.parse(BETWEEN_HOSTS), meeting.address())
            config = dataclasses.replace(config, transport=str(here))
        folder = RunFolder(record)
        try:
            with folder.created(config, False):
                SupervisedRun(folder, _Adoption(processes, script), lambda nodes, steps: None, hosts).run(config)
        finally:
            if folder.begun is not None:
                on_stderr(f"the record is written to {record}")


class _Adoption(Executable):
    """Scripts whose processes another launcher has started."""

    script, checkpoints = True, False

    def __init__(self, processes: Mapping[int, Adopted], script: str):
        super().__init__()
        self._processes, self.unjoined = processes, train_instead(script)

    def start(self, node_spec: NodeSpec) -> Child:
        return self._processes[node_spec.address].begin(node_spec)


def adopted(control: Control, place: Place, found: dict[int, Adopted], timeout: float) -> None:
    """Wait up to `timeout` seconds until all processes of this host have introduced themselves.

    Raises:
        ConfigurationError: the processes do not belong to one run, or some did not introduce themselves in time.
        RunError: a process has ended.
    """
    until, reminder = time.monotonic() + timeout, Reminder()
    while len(found) < place.local_workers:
        control.wait([one.connection for one in found.values()], 0.05)
        for data, connection in control.heard():
            said = msgspec.json.decode(data, type=Introduction)
            one = Adopted(connection, said)
            if (said.workers, said.version) != (place.workers, __version__):
                error = ConfigurationError(
                    "all processes of a host must have the same version of flockstep and the same number of workers: "
                    f"rank {said.rank} has flockstep {said.version} and {said.workers} workers, another process has "
                    f"{__version__} and {place.workers}; start all processes by one launcher, with one Python"
                )
                one.refuse(error)
                raise error
            if one.rank in found:
                raise ConfigurationError(
                    f"two processes have rank {one.rank}; call flockstep.distribute in only one process per rank"
                )
            found[one.rank] = one
            first = next(iter(found.values()))
            if one.replicas != first.replicas:
                raise ConfigurationError(
                    f"all processes must call flockstep.replica with equal arguments, got size={first.replicas[0]}, "
                    f"over_hosts={first.replicas[1]} on rank {first.rank} and size={one.replicas[0]}, "
                    f"over_hosts={one.replicas[1]} on rank {one.rank}; call it before flockstep.distribute"
                )
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
            control = Control("", HEARTBEAT, socket.socket(fileno=int(descriptor)))
            with contextlib.closing(control):
                adopted(control, place, found, float(timeout))
        finally:
            shutil.rmtree(folder_of(place), ignore_errors=True)
        run(place, script, float(timeout), folder(None, f"launch-{Path(script).stem}"), found)
