"""Lets workers wait for another coordinator when their coordinator has been killed.

A worker that waits holds a lock on a file in the run's folder, and looks there for its part in the run that continues.
Within one host this needs no port.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from functools import partial
from pathlib import Path
from threading import Event

import msgspec

from flockstep.drivers.member import NodeSpec, die_with
from flockstep.launchers.children import ENDED
from flockstep.records import owner
from flockstep.records.access import HALF, make_folder, open_file

PARKED = "parked"
"""Name of the folder, in a run's folder, with the files of the workers that wait for another coordinator."""
POLL = 0.05
"""Seconds between two checks for a part in the run."""
UNWIND = signal.SIGUSR2
"""Signal with which a thread interrupts the worker, whatever the worker is doing, when the coordinator has ended."""


class Part(msgspec.Struct):
    """A worker's part in a run: its node specification, and the run's configuration as TOML."""

    node_spec: NodeSpec
    config: str
    leader: int = 0
    """Number of the coordinator that wrote this part (see `owner.lead`)."""


class Orphaned(BaseException):
    """Raised in a worker when the coordinator of the run has ended."""


class Parking:
    """Lets a worker survive the death of its coordinator."""

    def __init__(self, seconds: float):
        """`seconds` for which the worker waits for another coordinator."""
        self._seconds = seconds
        self._leader = 0
        signal.signal(UNWIND, self._unwind)

    def follow(self, node_spec: NodeSpec, *folders: str) -> None:
        """Follow a coordinator from now on; when the coordinator ends, `folders` are removed."""
        new, self._leader = node_spec.supervisor != self._leader, node_spec.supervisor
        ended = partial(self._orphaned, node_spec.supervisor) if new else lambda: None  # one thread unwinds
        die_with(node_spec.supervisor, node_spec.directory, *folders, ended=ended)

    def wait(self, record: Path, rank: int, leaving: Event) -> Part | None:
        """Wait for a part in the run that another coordinator continues.

        Returns None if no part comes in time, or if a signal asks the worker to leave.
        """
        place = record / PARKED
        file = place / str(os.getpid())
        with contextlib.suppress(OSError):
            make_folder(place)
            half = file.with_suffix(HALF)
            with open_file(half, "w", private=True) as opened:
                import fcntl

                fcntl.flock(opened, fcntl.LOCK_EX)
                opened.write(str(rank))
                opened.flush()
                half.replace(file)  # a coordinator that looks meanwhile sees a whole file that is locked, or none
                try:
                    return self._part(record, file, leaving)
                finally:
                    file.unlink(missing_ok=True)
                    with contextlib.suppress(OSError):  # others wait
                        place.rmdir()
        return None

    def _part(self, record: Path, file: Path, leaving: Event) -> Part | None:
        until, answer = time.monotonic() + self._seconds, file.with_suffix(".part")
        while time.monotonic() < until and not leaving.is_set():
            with contextlib.suppress(FileNotFoundError, ValueError):
                part = msgspec.json.decode(answer.read_bytes(), type=Part)
                answer.unlink()
                if part.leader == owner.newest_leader(record):  # an earlier coordinator may only have been stopped
                    return part
            time.sleep(POLL)
        return None

    def _orphaned(self, leader: int) -> None:
        """The coordinator has ended, which a thread of its own has noticed: unwind the main thread, and end the process
        if it is in no other run when its time is over.
        """
        if leader != self._leader:
            return
        signal.pthread_kill(threading.main_thread().ident or 0, UNWIND)
        until = time.monotonic() + self._seconds + 1.0
        while leader == self._leader:
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(POLL)

    def _unwind(self, *_: object) -> None:
        raise Orphaned


class ParkedWorker:
    """A worker that waits in a run's folder, treated as a child by the next coordinator."""

    reason: str | None = None

    def __init__(self, file: Path):
        self._file = file
        self.pid, self.rank = int(file.name), int(file.read_text() or 0)
        self._handle = os.pidfd_open(self.pid)

    def begin(self, part: Part) -> ParkedWorker:
        """Give the worker its part in the run."""
        half = self._file.with_suffix(HALF)
        with open_file(half, "wb", private=True) as file:  # it has the secret
            file.write(msgspec.json.encode(part))
        half.replace(self._file.with_suffix(".part"))
        return self

    def exit_code(self) -> int | None:
        """Exit code of the worker: `ENDED` if the process has ended, None while it runs."""
        return ENDED if select.select([self._handle], [], [], 0)[0] else None

    def kill(self) -> None:
        """End the process at once."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class ParkedWorkers:
    """The workers that wait in a run's folder."""

    def __init__(self, record: Path | None = None):
        """`record`: the run's folder; None: no worker waits."""
        self._waiting: dict[int, ParkedWorker] = {}
        for file in [] if record is None else sorted((record / PARKED).glob("[0-9]*")):
            if not file.suffix and owner.is_locked(file):
                with contextlib.suppress(OSError, ValueError):
                    one = ParkedWorker(file)
                    self._waiting[one.rank] = one
            elif not file.suffix:
                file.unlink(missing_ok=True)

    def take(self, rank: int) -> ParkedWorker | None:
        """Return a waiting worker for a rank, preferably the worker that had this rank before; None if no worker
        waits.
        """
        if not self._waiting:
            return None
        return self._waiting.pop(rank if rank in self._waiting else max(self._waiting))

    def end(self) -> None:
        """End the waiting workers for which the continued run has no part."""
        while self._waiting:
            self._waiting.popitem()[1].kill()
