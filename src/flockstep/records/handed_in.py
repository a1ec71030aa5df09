"""Parameters that nodes hand in, in files beside the record: no process has to hold the models of several nodes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.errors import RunError
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

    @classmethod
    def of(cls, folders: Sequence[Path], address: Address, note: Fields) -> HandedIn:
        """What a node says that it has written, and into which of the folders."""
        tick, path = float(note["tick"]), folders[int(note["place"])]
        return cls(
            None if math.isinf(tick) else tick,
            address,
            str(path / file_name(address, tick)),
            str(note["dtype"]),
            int(note["size"]),
            int(note["buffers"]),
            float(note["t"]),
            int(note["step"]),
            int(note["sent"]),
        )

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
    """Where the nodes of a run may put what they hand in: beside the record, or else in the temporary folder."""
    others = [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108 - another file system; the folder is private
    return [record / SNAPSHOTS, *(place / f"flockstep-{run}" for place in others if place.is_dir())]


def file_name(address: Address, tick: float) -> str:
    """The name of the file for a node's parameters at a tick."""
    when = {LAST: "last", math.inf: "final"}.get(tick) or f"{tick:g}"
    return f"{node_name(address).replace(' ', '-')}.{when}"


def save(folders: Sequence[Path], name: str, arrays: Sequence[FlatArray]) -> int:
    """Write the arrays, one after the other, into the first of the folders that takes them; return which one did.

    Raises:
        RunError: none did.
    """
    reasons = []
    for number, folder in enumerate(folders):
        half = folder / f"{name}{_HALF}"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            with half.open("wb", buffering=0) as file:
                for array in arrays:
                    rest = np.ascontiguousarray(array).view(np.uint8).data
                    while rest:
                        rest = rest[file.write(rest) :]
            half.replace(folder / name)
        except OSError as error:
            half.unlink(missing_ok=True) if folder.is_dir() else None
            reasons.append(f"{folder}: {error.strerror}")
        else:
            return number
    raise RunError(f"the parameters could not be written anywhere ({'; '.join(reasons)}); free one of these places")
