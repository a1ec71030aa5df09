"""Parameters that nodes hand in, in files beside the record: no process has to hold the models of several nodes.

The supervisor writes the files as the parameters arrive, and the process that evaluates reads them.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError, RunError
from flockstep.messages import Address, Fields, node_name

LAST = -1.0
"""The tick of a node's newest parameters, handed in now and then and when a run fails; each replaces the one before."""
SNAPSHOTS = "snapshots"
_HALF = ".half"


class HandedIn(msgspec.Struct, frozen=True):
    """A node's parameters at a tick of progress, and where they lie; a `tick` of None is the end of its program."""

    tick: float | None
    address: int
    path: str
    dtype: str
    size: int
    buffers: int
    """Bytes of the buffers, which follow the parameters."""
    t: float
    step: int
    sent: int

    @property
    def nbytes(self) -> int:
        """Size of the parameters in bytes."""
        return self.size * numpy_dtype(self.dtype).itemsize

    def read(self, part: slice = slice(None)) -> FlatArray:
        """The parameters, or a part of them."""
        start, stop, _ = part.indices(self.size)
        dtype = numpy_dtype(self.dtype)
        with Path(self.path).open("rb") as file:
            file.seek(start * dtype.itemsize)
            read: FlatArray = np.empty(stop - start, dtype)
            if file.readinto(read.view(np.uint8).data) != read.nbytes:
                raise RunError(f"{self.path} is cut short: it holds less than {self.nbytes} bytes of parameters")
        return read

    def read_buffers(self) -> FlatArray:
        """The bytes of the buffers that were handed in with the parameters."""
        return np.fromfile(self.path, np.uint8, self.buffers, offset=self.nbytes)

    def remove(self) -> None:
        """Delete the file."""
        Path(self.path).unlink(missing_ok=True)


def places(record: Path, run: str) -> list[Path]:
    """Where what the nodes of a run hand in may lie: beside the record, or else in the temporary folder."""
    others = [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108 - another file system; the folder is private
    return [record / SNAPSHOTS, *(place / f"flockstep-{run}" for place in others if place.is_dir())]


def file_name(address: Address, tick: float) -> str:
    """The name of the file for a node's parameters at a tick."""
    when = {LAST: "last", math.inf: "final"}.get(tick) or f"{tick:g}"
    return f"{node_name(address).replace(' ', '-')}.{when}"


class Arriving:
    """A node's parameters and buffers on their way into a file: of one part after the other, none is kept in memory."""

    def __init__(self, folders: Sequence[Path], address: Address, note: Fields, largest: int):
        """Begin a file in the first of the folders that takes one; `largest`: bytes that the arrays have at most.

        Raises:
            ProtocolError: the note announces more than that.
            RunError: no folder takes a file.
        """
        self.tick = tick = float(note["tick"])
        self.item = HandedIn(
            None if math.isinf(tick) else tick,
            address,
            "",
            str(note["dtype"]),
            int(note["size"]),
            int(note["buffers"]),
            float(note["t"]),
            int(note["step"]),
            int(note["sent"]),
        )
        if not 0 <= self.item.nbytes <= largest or not 0 <= self.item.buffers <= largest:
            raise ProtocolError(f"{node_name(address)} announced a snapshot of more than {largest} bytes")
        self._missing = self.item.nbytes + self.item.buffers
        self._name = file_name(address, tick)
        self._folders, self._reasons = list(folders), list[str]()
        self._file: IO[bytes] | None = None
        self._open()

    def add(self, part: FlatArray) -> HandedIn | None:
        """Write the next part; return what is in the file once it is whole.

        Raises:
            ProtocolError: the part is longer than what is missing.
            RunError: no folder takes the part.
        """
        self._missing -= part.nbytes
        if self._missing < 0:
            raise ProtocolError(f"{node_name(self.item.address)} sent more of a snapshot than it had announced")
        rest = part.view(np.uint8).data
        while rest:
            assert self._file is not None
            try:
                rest = rest[self._file.write(rest) :]
            except OSError as error:
                self._give_up(error)
                self._open()
        return self._whole() if not self._missing else None

    def drop(self) -> None:
        """The rest never comes: remove the file."""
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)

    def _whole(self) -> HandedIn:
        assert self._file is not None
        half = Path(self._file.name)
        self._file.close()
        return msgspec.structs.replace(self.item, path=str(half.replace(half.with_name(self._name))))

    def _open(self) -> None:
        """Open a file in the next folder, with what the one before has taken."""
        before = self._file
        while self._folders:
            folder = self._folders[0]
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                self._file = (folder / f"{self._name}{_HALF}").open("wb", buffering=0)
                if before is not None:
                    with Path(before.name).open("rb") as taken:
                        shutil.copyfileobj(taken, self._file)
                    Path(before.name).unlink()
            except OSError as error:
                self._give_up(error)
            else:
                return
        if before is not None:
            Path(before.name).unlink(missing_ok=True)
        raise RunError(
            f"the parameters could not be written anywhere ({'; '.join(self._reasons)}); free one of these places"
        )

    def _give_up(self, error: OSError) -> None:
        """The first of the folders takes no more."""
        self._reasons.append(f"{self._folders.pop(0)}: {error.strerror}")
        if self._file is not None:
            self._file.close()
