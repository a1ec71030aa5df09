"""Stores the model snapshots that nodes send in files beside the record, from which they are evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from flockstep.arrays.kernels import FLOATS, numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ProtocolError, RunError
from flockstep.messages import Address, Fields, node_name
from flockstep.records.access import ArrivingFile, file_of, make_folder

LAST = -1.0
"""Value of `tick` for a node's most recent parameters; each such snapshot replaces the previous one."""
SNAPSHOTS = "snapshots"


class Snapshot(msgspec.Struct, frozen=True):
    """A node's parameters in a file; `tick` is the progress of the run, None at the end of the node's program."""

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

    def of_part(self, part: int) -> Snapshot:
        """Return the snapshot of a part of the model; a model that is not split has one part."""
        return self

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
        sums = {name: sum(getattr(piece, name) for piece in pieces) for name in ("size", "buffers", "sent_bytes")}
        seconds, step = max(piece.seconds for piece in pieces), min(piece.step for piece in pieces)
        first = pieces[0]
        place = tick, replica, first.path, first.dtype
        return cls(*place, seconds=seconds, step=step, pieces=tuple(pieces), **sums)

    def read(self, part: slice = slice(None)) -> FlatArray:
        start, stop, _ = part.indices(self.size)
        found, first = list[FlatArray](), 0
        for piece in self.pieces:
            found.append(piece.read(slice(max(0, start - first), max(0, min(piece.size, stop - first)))))
            first += piece.size
        return np.concatenate(found)

    def of_part(self, part: int) -> Snapshot:
        return self.pieces[part]

    def read_buffers(self) -> FlatArray:
        return np.concatenate([piece.read_buffers() for piece in self.pieces])

    def remove(self) -> None:
        for piece in self.pieces:
            piece.remove()


class SnapshotJoiner:
    """Joins the snapshots of the workers that hold the parts of a replica; snapshots of servers are passed on."""

    def __init__(self, parts: int):
        self._parts = parts
        self._known: dict[tuple[float | None, int], dict[int, Snapshot]] = {}
        """Tick and replica → part → snapshot of the part; with the tick LAST, the newest that no evaluation needs."""

    def add(self, item: Snapshot) -> list[Snapshot]:
        """Add the snapshot of a worker or server; return the snapshots that are now complete."""
        if self._parts == 1 or item.address < 0:
            return [item]
        replica, part = divmod(item.address, self._parts)
        found = list[Snapshot]()
        for tick in dict.fromkeys((LAST, item.tick) if item.tick in (None, LAST) else (item.tick,)):
            known = self._known.setdefault((tick, replica), {})
            known[part] = item
            # The ends of all parts are the final snapshot, not also a last one.
            if len(known) == self._parts and (tick != LAST or any(one.tick is not None for one in known.values())):
                found.append(WholeSnapshot.of(tick, replica, [known[one] for one in range(self._parts)]))
                if tick != LAST:
                    del self._known[tick, replica]
        return found


class SnapshotWriter:
    """Writes an arriving snapshot (parameters and buffers) to a file, part by part; no part is kept in memory."""

    def __init__(self, folder: Path, address: Address, note: Fields, largest: int):
        """Open a file in the folder; raise `ProtocolError` if `note` announces more than `largest` bytes."""
        self.tick = tick = float(note["tick"])
        try:
            announced = {**note, "tick": None if math.isinf(tick) else tick, "address": address, "path": ""}
            self.item = msgspec.convert(announced, Snapshot, strict=False)
        except ValueError as error:
            raise ProtocolError(f"{node_name(address)} announced something that is not a snapshot: {error}") from None
        if not self.item.nbytes <= largest or not self.item.buffers <= largest:
            raise ProtocolError(f"{node_name(address)} announced a snapshot of more than {largest} bytes")
        self._missing = self.item.nbytes + self.item.buffers
        when = {LAST: "last", math.inf: "final"}.get(tick) or f"{tick:g}"
        self._path = folder / f"{file_of(address)}.{when}"
        try:
            make_folder(folder)
            self._file = ArrivingFile(self._path)
        except OSError as error:
            raise self._refused(error) from None

    def add(self, part: FlatArray) -> Snapshot | None:
        """Write the next part of the snapshot; return the snapshot if the file is complete, otherwise None."""
        self._missing -= part.nbytes
        if self._missing < 0:
            raise ProtocolError(f"{node_name(self.item.address)} sent more bytes of a snapshot than announced")
        try:
            self._file.add(part.view(np.uint8).data)
            if self._missing:
                return None
            self._file.finish()
        except OSError as error:
            self.drop()
            raise self._refused(error) from None
        return msgspec.structs.replace(self.item, path=str(self._path))

    def drop(self) -> None:
        """Remove the incomplete file, because its other parts will not arrive."""
        self._file.drop()

    def _refused(self, error: OSError) -> RunError:
        return RunError(f"{self._path} could not be written: {error.strerror}; free space on its disk")
