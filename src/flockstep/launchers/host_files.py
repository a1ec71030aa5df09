"""Transfers files with the states of nodes between the coordinator and the agents of other hosts.

A node on another host writes its state to the folder of its agent, from which the coordinator fetches the file. A node
that continues from a checkpoint reads its state there, after the coordinator has sent the file.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from flockstep.errors import ProtocolError
from flockstep.launchers.host_messages import PartOf

PART = 1 << 18
"""Largest number of bytes of a file that one message carries."""
AHEAD = 1 << 22
"""Number of bytes queued for the other end at which no further parts of files are queued."""


class HostFiles:
    """The files in an agent's folder, and their transfers to and from the coordinator."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._arriving: dict[str, IO[bytes]] = {}
        self._leaving: deque[str] = deque()
        self._open: IO[bytes] | None = None
        """The file of the first transfer that waits, once its first part was sent."""

    @property
    def waiting(self) -> bool:
        """Whether parts of a file are still to be sent."""
        return bool(self._leaving)

    def store(self, message: PartOf, part: memoryview) -> None:
        """Append the next part of a file that the coordinator sends.

        Raises:
            OSError: the file cannot be written to the disk.
            ProtocolError: the file is not in the folder of the agent.
        """
        if message.path not in self._arriving:
            path = self._place(message.path)
            path.parent.mkdir(exist_ok=True)
            self._arriving[message.path] = path.open("wb")
        self._arriving[message.path].write(part)
        if message.last:
            self._arriving.pop(message.path).close()

    def discard(self, path: str) -> None:
        """Remove a folder of files that the nodes have read."""
        shutil.rmtree(self._place(path), ignore_errors=True)

    def fetch(self, path: str) -> None:
        """Let `parts` send a file, and remove it."""
        self._leaving.append(path)

    def parts(self) -> Iterator[tuple[PartOf, bytes]]:
        """Return the next parts of the files that the coordinator fetches; each file is removed after its last part."""
        while self._leaving:
            path = self._place(self._leaving[0])
            try:
                self._open = self._open or path.open("rb")
                data, why = self._open.read(PART), ""
            except OSError as error:
                data, why = b"", error.strerror or str(error)
            message = PartOf(self._leaving[0], len(data) < PART, why)
            if message.last:
                self._leaving.popleft()
                self._close(path)
            yield message, data

    def _close(self, path: Path) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None
        with contextlib.suppress(OSError):  # the node has begun the next checkpoint there
            path.unlink()
            path.parent.rmdir()

    def _place(self, path: str) -> Path:
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or PurePosixPath(path).is_absolute():
            raise ProtocolError(f"the coordinator named the file {path!r}, which is not in the folder of this agent")
        return self._folder.joinpath(*parts)

    def close(self) -> None:
        """Close all files that are open for a transfer."""
        for file in (*self._arriving.values(), *([self._open] if self._open is not None else [])):
            file.close()
