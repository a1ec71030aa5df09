"""Requests to add workers to a run on this machine. `flockstep join` sends them to the run's control socket, whose
address the run's supervisor keeps in the run's folder meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import select
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from flockstep.errors import ConfigurationError, PeerLost, RunError, require
from flockstep.links.control import Frames, LocalFrames, connected
from flockstep.records import owner
from flockstep.records.access import write_whole
from flockstep.records.folder import RunFolder

JOINING = "joining"
"""Name of the file, in the folder of the run, with the address of the supervisor's control socket."""
POLL = 0.05
"""Seconds between two attempts to reach the supervisor, whose socket is another one after a change of the workers."""
UNOWNED = 1.0
"""Seconds after which a run counts as ended if no process has owned its folder in the meantime."""


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True, tag="join"):
    """First message of a process that asks to add workers to a run."""

    workers: Annotated[int, msgspec.Meta(ge=1)]


class JoinAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The answer to a request to join: a sentence for the user, and whether the workers take part."""

    text: str
    joined: bool


class JoinRequests:
    """Requests to join a run, as the supervisor of the run hears and answers them."""

    def __init__(self, record: Path):
        """`record`: the run's folder."""
        self._file = record / JOINING
        self._new: list[tuple[Frames, int]] = []
        """Connections of those that ask, and the number of workers: not looked at yet."""
        self._waiting: list[tuple[Frames, int]] = []
        """Accepted, until the workers are admitted."""
        self._admitted: list[tuple[Frames, int]] = []
        """Of those whose workers take part from the change of the workers that is going on."""

    @contextlib.contextmanager
    def open(self, address: str) -> Iterator[None]:
        """Context manager in which requests can be sent to the control socket at `address`."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            shutil.rmtree(self._file)  # a folder of requests of an earlier version
        write_whole(self._file, address.encode())
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                if self._file.read_text() == address:  # otherwise the supervisor of the changed run has written it
                    self._file.unlink()

    @property
    def workers(self) -> int:
        """Number of workers that were requested and have not been admitted yet."""
        return sum(workers for _, workers in self._waiting)

    def hear(self, request: JoinRequest, connection: Frames) -> None:
        """Take a request, which is answered on the connection."""
        self._new.append((connection, request.workers))

    def admit(self) -> None:
        """Admit the waiting workers to the run."""
        self._admitted += self._waiting
        self._waiting = []

    def take(self, why_not: Callable[[int], str]) -> bool:
        """Accept the new requests, and refuse the requests for which `why_not(workers)` returns a reason; return
        whether a request was accepted.
        """
        before = len(self._waiting)
        while self._new:
            connection, workers = self._new.pop(0)
            if connection.disconnected():  # whoever asked has given up
                continue
            if reason := why_not(self.workers + workers):
                _answer(connection, JoinAnswer(reason, False))
            else:
                self._waiting.append((connection, workers))
        return len(self._waiting) > before

    def confirm(self, text: str) -> None:
        """Answer the requests whose workers were admitted: their workers take part, and `text` is for the user."""
        while self._admitted:
            _answer(self._admitted.pop()[0], JoinAnswer(text, True))

    def refuse(self, text: str) -> None:
        """Refuse all requests whose workers do not take part yet."""
        self._waiting += self._new
        self._new = []
        self.admit()
        while self._admitted:
            _answer(self._admitted.pop()[0], JoinAnswer(text, False))


def _answer(connection: Frames, answer: JoinAnswer) -> None:
    connection.send([msgspec.msgpack.encode(answer)])
    connection.close()


def ask(record: RunFolder, workers: int) -> str:
    """Add workers to the run in progress in a folder of this machine; return a sentence for the user when they take
    part.

    Raises:
        ConfigurationError: the run accepts no workers, or not this many.
        RunError: the run ended before the workers took part.
    """
    config = record.read_config()
    require(workers >= 1, "the number of workers that join", ">= 1", workers, "use -n 1")
    if config.max_workers is None:
        raise ConfigurationError(
            f"workers can join only a run with --max-workers, and {record.path} holds a run of "
            f"flockstep {config.kind} without it; stop the run and resume it with flockstep resume {record.path} -n "
            f"{config.workers + workers}"
        )
    if not owner.in_use(record.path):
        raise ConfigurationError(
            f"no process trains in {record.path}; resume a run that has stopped with flockstep resume {record.path} -n "
            f"{config.workers + workers}"
        )
    owned = time.monotonic()
    while time.monotonic() - owned < UNOWNED:
        if owner.in_use(record.path):
            owned = time.monotonic()
        with contextlib.suppress(FileNotFoundError, PeerLost):
            address = (record.path / JOINING).read_text()
            with contextlib.closing(LocalFrames(connected(address), math.inf)) as connection:
                connection.send([msgspec.msgpack.encode(JoinRequest(workers))])
                while not connection.ended:
                    owned = time.monotonic()
                    if (said := connection.receive(0)) is None:
                        select.select([connection], [], [], UNOWNED)
                        continue
                    answer = msgspec.msgpack.decode(said[0], type=JoinAnswer)
                    if not answer.joined:
                        raise ConfigurationError(answer.text)
                    return answer.text
        time.sleep(POLL)
    raise RunError(f"the run in {record.path} ended before the workers took part")
