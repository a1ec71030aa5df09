"""Requests to add workers to a run on this machine. `flockstep join` writes them to the run's folder, where the run's
supervisor answers.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from flockstep.errors import ConfigurationError, RunError, require
from flockstep.records import owner
from flockstep.records.access import make_folder, write_whole
from flockstep.records.folder import RunFolder

JOINING = "joining"
"""Name of the folder, in the folder of the run, that holds the requests to join."""
MOST = 1 << 10
"""Largest size of a request in bytes."""
POLL = 0.05
"""Seconds between two checks for an answer."""
UNOWNED = 1.0
"""Seconds after which a run counts as ended if no process has owned its folder in the meantime."""


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request to add workers to a run."""

    workers: int


class JoinAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """The answer to a request to join: a sentence for the user, and whether the workers take part."""

    text: str
    joined: bool


class JoinRequests:
    """Requests to join a run, as the supervisor of the run reads and answers them."""

    def __init__(self, record: Path):
        """`record`: the run's folder."""
        self._folder = record / JOINING
        self._waiting: dict[Path, int] = {}
        """Requests that were taken → number of workers, until the workers are admitted."""
        self._admitted: dict[Path, int] = {}
        """Requests whose workers take part from the change of the workers that is going on."""
        for file in self._folder.glob("*.request"):  # to a run before this one
            file.unlink(missing_ok=True)

    @property
    def workers(self) -> int:
        """Number of workers that were requested and have not been admitted yet."""
        return sum(self._waiting.values())

    def admit(self) -> None:
        """Admit the waiting workers to the run."""
        self._admitted.update(self._waiting)
        self._waiting.clear()

    def take(self, why_not: Callable[[int], str]) -> bool:
        """Accept the new requests, and refuse the requests for which `why_not(workers)` returns a reason.

        Other files in the folder are ignored.

        Returns:
            Whether a request was accepted.
        """
        new = False
        for file in sorted(self._folder.glob("*.request")):
            if file in self._waiting or file in self._admitted:
                continue
            try:
                with file.open("rb") as stream:
                    wanted = msgspec.json.decode(stream.read(MOST), type=JoinRequest).workers
            except (OSError, ValueError):
                continue
            if wanted < 1:
                continue
            if reason := why_not(self.workers + wanted):
                self._answer(file, JoinAnswer(reason, False))
            else:
                self._waiting[file], new = wanted, True
        return new

    def confirm(self, text: str) -> None:
        """Answer the requests whose workers were admitted: their workers take part, and `text` is for the user."""
        for file in self._admitted:
            self._answer(file, JoinAnswer(text, True))
        self._admitted.clear()

    def refuse(self, text: str) -> None:
        """Refuse all accepted requests whose workers do not take part yet."""
        for file in (*self._waiting, *self._admitted):
            self._answer(file, JoinAnswer(text, False))
        self._waiting.clear()
        self._admitted.clear()

    def _answer(self, file: Path, answer: JoinAnswer) -> None:
        with contextlib.suppress(OSError):  # the folder was removed: nobody waits
            write_whole(file.with_suffix(".answer"), msgspec.json.encode(answer))
            file.unlink()


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
    request = record.path / JOINING / f"{secrets.token_hex(8)}.request"
    make_folder(request.parent)
    answer = request.with_suffix(".answer")
    try:
        write_whole(request, msgspec.json.encode(JoinRequest(workers)))
        found = _answered(record, answer)
    finally:
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another request is there
            request.parent.rmdir()
    if not found.joined:
        raise ConfigurationError(found.text)
    return found.text


def _answered(record: RunFolder, answer: Path) -> JoinAnswer:
    """Wait for the answer of the run's supervisor."""
    owned = time.monotonic()
    while True:
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode(answer.read_bytes(), type=JoinAnswer)
        if owner.in_use(record.path):
            owned = time.monotonic()
        elif time.monotonic() - owned > UNOWNED:
            raise RunError(f"the run in {record.path} ended before the workers took part")
        time.sleep(POLL)
