"""Stores the model snapshots that nodes send in files beside the record, so that no process holds several models in
memory.

The supervisor writes the files as the parameters arrive; the evaluating process reads them.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, ProtocolError, RunError
from flockstep.messages import Address, Fields, node_name
from flockstep.records.access import make_folder, open_file
from flockstep.records.scratch import scratch

LAST = -1.0
"""Value of `tick` for a node's most recent parameters, which are sent from time to time and when a run fails. Each
such snapshot replaces the previous one.
"""
SNAPSHOTS = "snapshots"
_HALF = ".half"


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot of a node's parameters, in a file; `tick` is the progress of the run at the snapshot.

    A `tick` of None is the end of the node's program.
    """

    tick: float | None
    address: int
    path: str
    dtype: str
    size: int
    buffers: int
    """Size of the model's buffers (state that is not trained) in bytes; the file holds them after the parameters."""
    seconds: float
    step: int
    sent_bytes: int

    def __post_init__(self) -> None:
        if self.dtype not in FLOATS or self.size < 0 or self.buffers < 0:
            raise ValueError(f"a snapshot cannot have {self.size} elements of {self.dtype!r} and {self.buffers} bytes")

    @property
    def nbytes(self) -> int:
        """Size of the snapshot's parameters in bytes."""
        return self.size * numpy_dtype(self.dtype).itemsize

    def read(self, part: slice = slice(None)) -> FlatArray:
        """Read the parameters, or a slice of them."""
        start, stop, _ = part.indices(self.size)
        dtype = numpy_dtype(self.dtype)
        self._require_whole()
        with Path(self.path).open("rb") as file:
            file.seek(start * dtype.itemsize)
            read: FlatArray = np.empty(stop - start, dtype)
            file.readinto(read.view(np.uint8).data)
        return read

    def read_buffers(self) -> FlatArray:
        """Read the model's buffers (state that is not trained) from the snapshot's file, as bytes."""
        self._require_whole()
        return np.fromfile(self.path, np.uint8, self.buffers, offset=self.nbytes)

    def _require_whole(self) -> None:
        if Path(self.path).stat().st_size != self.nbytes + self.buffers:
            raise RunError(
                f"{self.path} is damaged: it does not hold {self.nbytes} bytes of parameters and {self.buffers} bytes "
                "of buffers"
            )

    def remove(self) -> None:
        """Delete the file that holds the snapshot's parameters and buffers, if the file still exists."""
        Path(self.path).unlink(missing_ok=True)


class WholeSnapshot(Snapshot, frozen=True):
    """A snapshot of a whole model that is split over workers, made of the snapshots of its parts, in order."""

    pieces: tuple[Snapshot, ...]

    @classmethod
    def of(cls, tick: float | None, replica: Address, pieces: Sequence[Snapshot]) -> WholeSnapshot:
        """Join the snapshots of the parts of a split model into a snapshot of the whole model."""
        return cls(
            tick,
            replica,
            pieces[0].path,
            pieces[0].dtype,
            sum(piece.size for piece in pieces),
            sum(piece.buffers for piece in pieces),
            max(piece.seconds for piece in pieces),
            min(piece.step for piece in pieces),
            sum(piece.sent_bytes for piece in pieces),
            tuple(pieces),
        )

    def read(self, part: slice = slice(None)) -> FlatArray:
        start, stop, _ = part.indices(self.size)
        found, first = list[FlatArray](), 0
        for piece in self.pieces:
            found.append(piece.read(slice(max(0, start - first), max(0, min(piece.size, stop - first)))))
            first += piece.size
        return np.concatenate(found)

    def read_buffers(self) -> FlatArray:
        return np.concatenate([piece.read_buffers() for piece in self.pieces])

    def remove(self) -> None:
        for piece in self.pieces:
            piece.remove()


class SnapshotJoiner:
    """Joins the snapshots of the workers that hold the parts of a replica; snapshots of servers are passed on."""

    def __init__(self, parts: int):
        self._parts = parts
        self._waiting: dict[tuple[float | None, int], dict[int, Snapshot]] = {}
        """Tick and replica → part → snapshot of the part."""
        self._newest: dict[int, dict[int, Snapshot]] = {}
        """Replica → part → newest snapshot of the part that was not sent for an evaluation."""

    def add(self, item: Snapshot) -> list[Snapshot]:
        """Add the snapshot of a worker or server; return the snapshots that are now complete."""
        if self._parts == 1 or item.address < 0:
            return [item]
        replica, part = divmod(item.address, self._parts)
        found = list[Snapshot]()
        if item.tick is None or item.tick == LAST:
            newest = self._newest.setdefault(replica, {})
            newest[part] = item
            if len(newest) == self._parts and any(piece.tick is not None for piece in newest.values()):
                found.append(WholeSnapshot.of(LAST, replica, [newest[one] for one in range(self._parts)]))
        if item.tick != LAST:
            known = self._waiting.setdefault((item.tick, replica), {})
            known[part] = item
            if len(known) == self._parts:
                del self._waiting[item.tick, replica]
                found.append(WholeSnapshot.of(item.tick, replica, [known[one] for one in range(self._parts)]))
        return found


class SnapshotFolders:
    """The folders in which a run's snapshots are stored: one in its record and, if that one cannot be written to,
    private folders in the temporary folder and in the memory of the host.
    """

    def __init__(self, record: Path, others: Sequence[Path] | None = None):
        """`others`: the places for private folders; None for the usual places."""
        usual = [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108 - only private folders are made there
        self.places = [record, *(place for place in (usual if others is None else others) if place.is_dir())]
        self._private = dict[Path, Path]()
        self._open = contextlib.ExitStack()

    def folder_in(self, place: Path) -> Path:
        """Return the folder for snapshots in one of `places`, which is created if it is missing.

        Raises:
            OSError: the folder cannot be created.
            ConfigurationError: the file system cannot keep other users out of the folder.
        """
        if place == self.places[0]:
            folder = place / SNAPSHOTS
            make_folder(folder)
            return folder
        if place not in self._private:
            self._private[place] = self._open.enter_context(scratch(place))
        return self._private[place]

    def remove(self) -> None:
        """Remove the folders with all snapshots; later snapshots are stored in new folders."""
        shutil.rmtree(self.places[0] / SNAPSHOTS, ignore_errors=True)
        self._private.clear()
        self._open.close()


def file_name(address: Address, tick: float) -> str:
    """Return the name of the file with a node's parameters at a tick of progress."""
    when = {LAST: "last", math.inf: "final"}.get(tick) or f"{tick:g}"
    return f"{node_name(address).replace(' ', '-')}.{when}"


class SnapshotWriter:
    """Writes an arriving snapshot (parameters and buffers) to a file, part by part; no part is kept in memory."""

    def __init__(self, folders: SnapshotFolders, address: Address, note: Fields, largest: int):
        """Open a file in the first place that accepts one.

        `largest`: upper limit of the arrays' size in bytes.

        Raises:
            ProtocolError: the announced size exceeds `largest`.
            RunError: no place accepts a file.
        """
        self.tick = tick = float(note["tick"])
        try:
            self.item = Snapshot(
                None if math.isinf(tick) else tick,
                address,
                "",
                str(note["dtype"]),
                int(note["size"]),
                int(note["buffers"]),
                float(note["seconds"]),
                int(note["step"]),
                int(note["sent_bytes"]),
            )
        except ValueError as error:
            raise ProtocolError(f"{node_name(address)} announced something that is not a snapshot: {error}") from None
        if not self.item.nbytes <= largest or not self.item.buffers <= largest:
            raise ProtocolError(f"{node_name(address)} announced a snapshot of more than {largest} bytes")
        self._missing = self.item.nbytes + self.item.buffers
        self._name = file_name(address, tick)
        self._folders, self._places, self._reasons = folders, list(folders.places), list[str]()
        self._file: IO[bytes] | None = None
        self._open()

    def add(self, part: FlatArray) -> Snapshot | None:
        """Write the next part of the snapshot; return the snapshot if the file is complete, otherwise None.

        Raises:
            ProtocolError: the part is longer than the rest of the file.
            RunError: the part cannot be written to any place.
        """
        self._missing -= part.nbytes
        if self._missing < 0:
            raise ProtocolError(f"{node_name(self.item.address)} sent more bytes of a snapshot than announced")
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
        """Remove the incomplete file, because its other parts will not arrive."""
        if self._file is not None:
            self._file.close()
            Path(self._file.name).unlink(missing_ok=True)

    def _whole(self) -> Snapshot:
        assert self._file is not None
        half = Path(self._file.name)
        self._file.close()
        return msgspec.structs.replace(self.item, path=str(half.replace(half.with_name(self._name))))

    def _open(self) -> None:
        """Open a file in the next place, and copy the parts that the previous place took."""
        before = self._file
        while self._places:
            try:
                folder = self._folders.folder_in(self._places[0])
                self._file = open_file(folder / f"{self._name}{_HALF}", "wb", buffering=0)
                if before is not None:
                    with Path(before.name).open("rb") as taken:
                        shutil.copyfileobj(taken, self._file)
                    Path(before.name).unlink()
            except (OSError, ConfigurationError) as error:
                self._give_up(error)
            else:
                return
        if before is not None:
            Path(before.name).unlink(missing_ok=True)
        raise RunError(
            f"the parameters could not be written to any place ({'; '.join(self._reasons)}); free space in one of "
            "these places"
        )

    def _give_up(self, error: OSError | ConfigurationError) -> None:
        """Remove the first place from the list, because it accepts no more data."""
        why = error.strerror if isinstance(error, OSError) else error
        self._reasons.append(f"{self._places.pop(0)}: {why}")
        if self._file is not None:
            self._file.close()
