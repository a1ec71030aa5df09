"""The tape of a node: the order in which a real run's inputs entered the node's program, from which the run is
replayed.

A program depends on nothing but its state and its inputs, so a tape holds no array: of a message it has the sender and
the number, of a gradient a checksum. Each entry has the place at which it entered, which counts the program's own
requests. One file for each node and segment of a run: a line of JSON (`TapeHeader`), then the entries. An entry begins
with a number, whose last three bits are its kind; the rest is the difference of its place to that of the entry before.
Numbers are written in groups of seven bits, lowest first.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec

from flockstep.errors import ConfigurationError, RunError
from flockstep.messages import Address
from flockstep.records.access import open_file, write_whole

TAPES = "tapes"
"""Folder of a record with a folder for each segment of the run."""
CONFIG = "config.toml"
"""Name of the file with the configuration of a segment, in the folder of its tapes."""
GROWTH = 1 << 16
"""Number of bytes by which the file of a tape grows while it is written."""
LAST_TICK = 1 << 62
"""Number on the tape of the evaluation of a node's final parameters, whose tick is infinite."""
HEARD, NUMBERED, SAID, READING, STEP, SNAPSHOT = range(1, 7)


class TapeHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a node knew when its program began: its place among the nodes of this segment of the run."""

    node: Address
    epoch: int
    ranks: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    servers: int
    memory: bool
    """Whether all workers of the run shared memory."""
    host_memory: bool
    """Whether this worker shared memory with the others of its host, in a run with several hosts."""
    spec: str
    """The node specification as JSON, without the run's secret."""


class MessageEntry(msgspec.Struct, frozen=True):
    """The message number `number` of `source` entered."""

    place: int
    source: Address
    number: int


class Said(msgspec.Struct, frozen=True):
    """The supervisor said something; `text` is the note as JSON."""

    place: int
    tag: str
    text: str


class Reading(msgspec.Struct, frozen=True):
    """The program has read the clock."""

    place: int
    seconds: float


class GradientEntry(msgspec.Struct, frozen=True):
    """A worker has used a gradient; `checks`: the gradient's checksums."""

    place: int
    loss: float | None
    checks: tuple[int, ...]


class SnapshotEntry(msgspec.Struct, frozen=True):
    """The node's parameters were evaluated after `step` steps of the node; `checks`: their checksums."""

    place: int
    tick: int
    step: int
    checks: tuple[int, ...]


TapeEntry = MessageEntry | Said | Reading | GradientEntry | SnapshotEntry


class TapeSink(Protocol):
    """Where the bytes of a tape go."""

    def write(self, data: bytes) -> None:
        """Append bytes to the tape."""

    def flush(self) -> None:
        """Let the bytes so far survive this process."""

    def close(self) -> None:
        """End the tape; a second call has no effect."""


class MappedFile(TapeSink):
    """A file whose bytes survive the end of the process that writes them, however it ends."""

    def __init__(self, path: Path):
        """Open the file of a tape; raise `RunError` if it cannot be written, as `write` does."""
        self._path, self._end = path, 0
        with self._writing(), ExitStack() as stack:
            self._file = stack.enter_context(open_file(path, "w+b"))
            self._fill(GROWTH)
            self._map = mmap.mmap(self._file.fileno(), GROWTH)
            stack.pop_all()

    def write(self, data: bytes) -> None:
        end = self._end + len(data)
        if end > len(self._map):
            with self._writing():
                self._fill(len(data) + GROWTH)
                self._map.resize(len(self._map) + len(data) + GROWTH)
        self._map[self._end : end] = data
        self._end = end

    def flush(self) -> None:
        """Do nothing, because the bytes survive."""

    def close(self) -> None:
        if not self._file.closed:
            self._map.close()
            self._file.truncate(self._end)
            self._file.close()

    def _fill(self, nbytes: int) -> None:
        """Append zeros to the file: the system ends a process that writes to a map of a file without disk space."""
        self._file.seek(0, os.SEEK_END)
        self._file.write(bytes(nbytes))
        self._file.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self._path} cannot be written: {error.strerror}; free some space, or leave out --replayable"
            ) from None


class SentTape(TapeSink):
    """Sends the bytes of a tape to the coordinator, together with events; a process that is killed loses the last."""

    def __init__(self, send: Callable[[bytes], None]):
        self._send, self._held = send, bytearray()

    def write(self, data: bytes) -> None:
        self._held += data

    def flush(self) -> None:
        """Send what was written so far."""
        if self._held:
            data, self._held = bytes(self._held), bytearray()
            self._send(data)

    def close(self) -> None:
        self.flush()


class TapeWriter:
    """Writes the tape of a node."""

    def __init__(self, sink: TapeSink, header: TapeHeader):
        self._write, self.flush, self.close = sink.write, sink.flush, sink.close
        self._place = 0
        self._numbers: dict[Address, int] = {}
        self._write(msgspec.json.encode(header) + b"\n")

    def heard(self, place: int, source: Address, number: int) -> None:
        """Add a message that entered."""
        follows = number == self._numbers.get(source, 0) + 1
        self._numbers[source] = number
        head = (place - self._place) << 3 | (HEARD if follows else NUMBERED)
        self._place = place
        whom = source << 1 if source >= 0 else ~source << 1 | 1
        if follows and head < 128 and whom < 128:
            self._write(bytes((head, whom)))
        else:
            self._write(_varint(head) + _varint(whom) + (b"" if follows else _varint(number)))

    def said(self, place: int, tag: str, text: str) -> None:
        """Add something that the supervisor said."""
        data = msgspec.json.encode([tag, text])
        self._write(self._head(place, SAID) + _varint(len(data)) + data)

    def reading(self, place: int, seconds: float) -> None:
        """Add a reading of the clock."""
        self._write(self._head(place, READING) + struct.pack("<d", seconds))

    def gradient(self, place: int, loss: float | None, checks: bytes) -> None:
        """Add a gradient; `checks`: its checksums, of 4 bytes each."""
        given = b"\0" if loss is None else b"\1" + struct.pack("<d", loss)
        self._write(self._head(place, STEP) + given + _varint(len(checks) // 4) + checks)

    def snapshot(self, place: int, tick: int, step: int, checks: bytes) -> None:
        """Add an evaluation of the node's parameters."""
        self._write(self._head(place, SNAPSHOT) + _varint(tick) + _varint(step) + _varint(len(checks) // 4) + checks)

    def _head(self, place: int, kind: int) -> bytes:
        moved, self._place = place - self._place, place
        return _varint(moved << 3 | kind)


def read_tape(path: Path) -> tuple[TapeHeader, Iterator[TapeEntry]]:
    """Read the tape of a node, whose entries are decoded one by one.

    Raises:
        ConfigurationError: the file is damaged, which may show at one of the entries.
    """
    line, _, data = path.read_bytes().partition(b"\n")
    with _undamaged(path):
        return msgspec.json.decode(line, type=TapeHeader), _entries(path, data)


@contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, IndexError, struct.error, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} is damaged: {error}; record the run again") from None


def _entries(path: Path, data: bytes) -> Iterator[TapeEntry]:
    with _undamaged(path):
        yield from _decoded(data)


def _decoded(data: bytes) -> Iterator[TapeEntry]:
    at = place = 0
    numbers: dict[Address, int] = {}

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def taken(nbytes: int) -> bytes:
        nonlocal at
        if at + nbytes > len(data):
            raise ValueError(f"its last entry needs {at + nbytes - len(data)} more bytes")
        at += nbytes
        return data[at - nbytes : at]

    def seconds() -> float:
        (value,) = struct.unpack("<d", taken(8))
        return float(value)

    def checks() -> tuple[int, ...]:
        return struct.unpack(f"<{(count := number())}I", taken(4 * count))

    while at < len(data) and data[at]:  # zeros follow the last entry of a process that was killed
        head = number()
        place, kind = place + (head >> 3), head & 7
        match kind:
            case 1 | 2:
                whom = number()
                source = ~(whom >> 1) if whom & 1 else whom >> 1
                numbers[source] = numbers.get(source, 0) + 1 if kind == HEARD else number()
                yield MessageEntry(place, source, numbers[source])
            case 3:
                tag, text = msgspec.json.decode(taken(number()), type=tuple[str, str])
                yield Said(place, tag, text)
            case 4:
                yield Reading(place, seconds())
            case 5:
                yield GradientEntry(place, seconds() if taken(1) != b"\0" else None, checks())
            case 6:
                yield SnapshotEntry(place, number(), number(), checks())
            case _:
                raise ValueError(f"byte {at} begins an unknown kind of entry")


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    found = bytearray()
    while value >= 128:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def is_sent(tapes: str) -> bool:
    """Return whether a node sends its tape to the coordinator, on whose host the folder of the segment is; `tapes` then
    is the name of the folder, otherwise its path.
    """
    return not Path(tapes).is_absolute()


def segments_of(record: Path) -> list[Path]:
    """Return the folders with the tapes of a record's segments, in their order."""
    return sorted((record / TAPES).glob("[0-9]*"), key=lambda folder: int(folder.name))


def new_segment(record: Path, config: str) -> Path:
    """Make the folder for the tapes of a run's next segment, with its configuration as TOML."""
    folder = record / TAPES / str(len(segments_of(record)))
    write_whole(folder / CONFIG, config.encode())
    return folder


def tape_file(folder: Path, node: Address) -> Path:
    """Return the path of a node's tape in the folder of its segment."""
    return folder / (f"worker-{node}.tape" if node >= 0 else f"server-{-1 - node}.tape")


def note_as_json(note: Any) -> str:
    """Return a note of the supervisor as JSON, without the run's secret."""
    plain = msgspec.to_builtins(note)
    if spec := plain.get("spec"):
        plain["spec"] = without_secret(str(spec))
    return msgspec.json.encode(plain).decode()


def without_secret(spec: str) -> str:
    """Return a node specification as JSON, without the run's secret."""
    return msgspec.json.encode({**msgspec.json.decode(spec), "secret": ""}).decode()
