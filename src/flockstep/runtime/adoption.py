"""Lets a process that torchrun, mpirun or srun has started join its run through the agent of its host.

The process with local rank 0 starts the agent. All processes of the host connect to the agent's control socket in a
folder that only this user may enter; the first message of each is an `Introduction`, which is answered with its node
specification when the run begins. The connection stays open, so that the agent detects the end of the process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from flockstep import __version__
from flockstep.errors import ConfigurationError, FlockstepError, RunError, of_kind
from flockstep.links.control import CONTROL_BYTES, LocalFrames
from flockstep.records.scratch import require_private
from flockstep.runtime.member import NodeSpec
from flockstep.runtime.place import Place

TIMEOUT = 600.0
"""Default time in seconds within which all processes of a run must have connected."""
REMIND = 10.0
"""Seconds between two printed reminders of what a process waits for."""
RETRY = 0.02
"""Seconds between two attempts to reach the agent."""
LAST = 30.0
"""Seconds that the process with local rank 0 waits, when it ends, until the agent has completed the record."""
CRASHED, FINISHED = b"1", b"0"
"""Last message that a process sends to the agent. CRASHED: the process ended with an uncaught error. FINISHED: it ended
without an error.
"""
_AGENT = """
import sys
sys.path.append(sys.argv.pop(1))
from flockstep.experiments.folders import folder
from flockstep.launchers.adopter import main
main(folder)
"""


class Introduction(msgspec.Struct, forbid_unknown_fields=True):
    """Message with which a process introduces itself to the agent of its host."""

    rank: int
    workers: int
    process: int
    """Process id of the process that introduces itself."""
    version: str
    """Version of flockstep in the process that introduces itself."""
    replica_size: int = 1
    """Number of processes that hold one replica of the model together."""
    replica_over_hosts: bool = False
    """Whether the processes of one replica may run on several hosts."""


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """The agent's answer to an introduction: a node specification, or the kind and the reason of an error."""

    spec: NodeSpec | None = None
    kind: str = ""
    reason: str = ""


def folder_of(place: Place) -> Path:
    """Folder of the agent's socket, different for each user, each run and each of the launcher's nodes on this host,
    even if several hosts share the file system.
    """
    group = f"{socket.gethostname()} {os.getuid()} {place.run} {place.node_rank}"
    name = hashlib.sha256(group.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"flockstep-{name}"


def adopt(
    place: Place, script: str, timeout: float, *, replica_size: int = 1, replica_over_hosts: bool = False
) -> NodeSpec:
    """Join the run of the processes that a launcher has started, and return the node specification of this process.

    Args:
        place: place of this process among them.
        script: path of the script.
        timeout: seconds within which all processes must have connected. Between hosts, the value given by the process
            with local rank 0 is used.
        replica_size: number of processes that hold one replica of the model together, equal in all processes.
        replica_over_hosts: whether the processes of one replica may run on several hosts.

    Raises:
        ConfigurationError: the run cannot begin.
        RunError: the agent of this host has ended.
    """
    folder = folder_of(place)
    with contextlib.ExitStack() as stack:
        try:
            if place.local_rank == 0:
                _start_agent(place, folder, script, timeout)
            sock = _connected(place, folder, timeout)
        except FlockstepError as error:  # no agent prints it
            sys.stderr.write(f"flockstep: {error}\n")
            say_nothing_of(error)
            raise
        connection = stack.enter_context(contextlib.closing(LocalFrames(sock, TIMEOUT)))
        introduction = Introduction(
            place.rank, place.workers, os.getpid(), __version__, replica_size, replica_over_hosts
        )
        connection.send([msgspec.json.encode(introduction)])
        while (said := connection.receive(0, CONTROL_BYTES)) is None:
            if connection.ended:
                raise RunError("the agent of this host ended before the run began; see the output of the agent")
            wait([connection.fileno()])
        answer = msgspec.json.decode(said[0], type=Answer)
        if answer.spec is None:
            refusal = of_kind(answer.kind, answer.reason)
            say_nothing_of(refusal)
            raise refusal
        stack.pop_all()
    atexit.register(_say_end, connection, os.getpid())
    return dataclasses.replace(answer.spec, process=os.getpid())


def say_nothing_of(error: FlockstepError) -> None:
    """Keep Python from printing `error` if no code catches it, because another process prints it."""
    hook = sys.excepthook

    def quiet(kind: type[BaseException], raised: BaseException, trace: object) -> None:
        if raised is not error:
            hook(kind, raised, trace)  # type: ignore[arg-type]

    sys.excepthook = quiet


def _start_agent(place: Place, folder: Path, script: str, timeout: float) -> None:
    """Start the agent, which takes over a socket that listens already."""
    with _listening(folder) as listener:
        words = [sys.executable, "-P", "-c", _AGENT, str(Path(__file__).parents[2])]
        words += [str(listener.fileno()), msgspec.json.encode(place).decode(), script, str(timeout)]
        agent = subprocess.Popen(  # in a session of its own: it outlives the processes, to complete the record
            words, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()], start_new_session=True
        )
    atexit.register(functools.partial(_wait, agent, os.getpid()))


def _listening(folder: Path) -> socket.socket:
    """A socket that listens in the folder, which is made anew."""
    with contextlib.suppress(FileNotFoundError):
        require_private(folder)
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            sock.connect(str(folder / "agent"))
            raise ConfigurationError(
                f"another process with local rank 0 has already started this run on this host ({folder}); let the "
                "launcher start each rank only once"
            )
        shutil.rmtree(folder)  # of processes that were killed
    folder.mkdir(mode=0o700)
    require_private(folder)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "agent"))
    listener.listen(1024)
    return listener


def _connected(place: Place, folder: Path, timeout: float) -> socket.socket:
    """A connection to the agent of this host, as soon as it is there."""
    until, reminded = time.monotonic() + timeout, time.monotonic()
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            require_private(folder)
            sock.connect(str(folder / "agent"))
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            return sock
        now = time.monotonic()
        if now > until:
            raise ConfigurationError(
                f"rank {place.rank} has waited {timeout:g} s for the process with local rank 0 of this host, which "
                f"{place.by} should have started; every process must call flockstep.distribute or flockstep.join"
            )
        if now - reminded > REMIND:
            reminded = now
            sys.stderr.write(f"flockstep: rank {place.rank} waits for local rank 0 of its host\n")
        time.sleep(RETRY)


def _say_end(connection: LocalFrames, process: int) -> None:
    """Tell the agent how this process ends; in a forked child, do nothing."""
    if os.getpid() == process:
        connection.send([CRASHED if getattr(sys, "last_value", None) is not None else FINISHED])


def _wait(agent: subprocess.Popen[bytes], process: int) -> None:
    if os.getpid() == process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(LAST)
