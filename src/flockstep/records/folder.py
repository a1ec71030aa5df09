"""A run's folder: config.toml, events.jsonl, summary.json, result.npy and schema.json.

While a real run is going the launcher writes the events of every node to a file of its own (events/worker-0.jsonl,
events/server-0.jsonl, events/launcher.jsonl); `merge_events` joins them into events.jsonl, sorted by time. Readers cope
with both, with files that are missing, and with the half-written last line of a killed process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError, RunError, SchemaMismatch
from flockstep.messages import Address, node_name
from flockstep.records import owner
from flockstep.records.config import RunConfig, same_run
from flockstep.records.events import HELD_BACK, Event, Figure, Replica, Snapshot
from flockstep.records.full_disk import FULL, HALF, replace, say_full, write_whole
from flockstep.records.handed_in import SNAPSHOTS
from flockstep.records.owner import OWNER, owned
from flockstep.records.summary import Summary, summarise, time_of

T = TypeVar("T")

ENDED = ("finished", "diverged")
"""What the status of a run is that there is no reason to repeat."""
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


@dataclass(frozen=True)
class Record:
    """All that a run left: what tables, figures and tests read."""

    config: RunConfig
    summary: Summary
    events: list[Event]


class EventWriter:
    """Appends events to a file, one JSON document a line.

    Up to `flush_every` - 1 steps, updates and spans are held back; everything else is written at once. What was
    written survives the death of the process. A half-written last line that an earlier writer left is removed.
    """

    def __init__(self, path: Path | str, flush_every: int = 8):
        if flush_every < 1:
            raise ConfigurationError(f"flush_every must be >= 1, got {flush_every}; use 1 to hold nothing back")
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._held = 0
        self._flush_every = flush_every
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        _remove_half_line(Path(path))
        self._path, self._lost = Path(path), 0
        self._file = Path(path).open("ab", buffering=0)  # noqa: SIM115 - closed by close()

    def write(self, event: Event) -> None:
        """Add one event."""
        self._encoder.encode_into(event, self._buffer, -1)
        self._buffer += b"\n"
        self._held += 1
        if self._held >= self._flush_every or not isinstance(event, HELD_BACK):
            self.flush()

    def flush(self) -> None:
        """Hand what is held back to the operating system; where a full disk does not take it, drop it with a warning.

        After a part of a line no event could be read any more, so the rest of that line is tried again first.
        """
        try:
            while self._buffer:
                taken = self._file.write(self._buffer)
                del self._buffer[:taken]
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._drop(error)
        self._held = 0

    def _drop(self, error: OSError) -> None:
        """Drop the whole lines that are held back, but not the rest of a line that was begun."""
        begun = self._buffer.find(b"\n") + 1 if self._in_line() else 0
        dropped = self._buffer.count(b"\n", begun)
        del self._buffer[begun:]
        if not self._lost:
            say_full(self._path, error, "events are missing from the record from now on")
        self._lost += dropped

    def _in_line(self) -> bool:
        """Whether the file ends in the middle of a line."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                return file.read(1) != b"\n"
        return False

    def close(self) -> None:
        """Flush and close; again is harmless."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class RunFolder:
    """The record of one run on disk; nothing is touched until a method is called."""

    path: Path

    def __init__(self, path: Path | str):
        object.__setattr__(self, "path", Path(path))

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def events_file(self) -> Path:
        """All events of a run that has ended, or of a simulation."""
        return self.path / "events.jsonl"

    @property
    def summary_file(self) -> Path:
        """The run in figures."""
        return self.path / "summary.json"

    @property
    def result_file(self) -> Path:
        """The resulting model's flat parameters."""
        return self.path / "result.npy"

    @contextlib.contextmanager
    def created(self, config: RunConfig, overwrite: bool = False) -> Iterator[None]:
        """Own the folder, made ready for `config`; with `overwrite`, the run that it holds is removed.

        Raises:
            ConfigurationError: another process owns it, or it holds what a run computed, or files that are no run.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(f"{self.path} is a file, not a folder; choose another folder for the run")
        if self.path.exists() and not self.config_file.exists() and not all(map(_may_go, self.path.iterdir())):
            raise ConfigurationError(f"{self.path} holds files but no run; choose an empty or a new folder")
        with owned(self.path):
            if not overwrite and (what := self._computed()) is not None:
                raise ConfigurationError(
                    f"{self.path} holds {what} run; choose another folder with --out, or replace it with --overwrite"
                )
            self._clear()
            self.write_config(config)
            yield

    @property
    def unfinished(self) -> bool:
        """Whether there is no run that came to its end, so that there is reason to repeat it."""
        return self._status() not in ENDED and not _gone(self.summary_file)

    def check_whole(self, nodes: Iterable[Address | None] = ()) -> None:
        """Check that nobody has removed what this process and the nodes of its run have written so far.

        Raises:
            RunError: the folder, or a file in it, is gone.
        """
        owner.check(self.path)
        for file in (self.config_file, *map(self.node_events_file, nodes)):
            if not file.exists():
                raise RunError(
                    f"{file} was removed while its run was going on, so the record is not whole; repeat the run with "
                    "--overwrite"
                )

    def holds_finished(self, config: RunConfig) -> bool:
        """Whether this run is already here, finished: then there is nothing to do."""
        return self.config_file.exists() and not self.unfinished and same_run(self.read_config(), config)

    def write_config(self, config: RunConfig) -> None:
        """Write config.toml."""
        replace(self.config_file, config.to_toml().encode())

    def read_config(self) -> RunConfig:
        """Read config.toml.

        Raises:
            ConfigurationError: there is none, or it does not describe a run.
        """
        if not self.config_file.is_file():
            raise ConfigurationError(f"{self.path} holds no run: config.toml is missing; name the folder of a run")
        return RunConfig.from_toml(
            self.config_file.read_text(encoding="utf-8", errors="replace"), str(self.config_file)
        )

    def node_events_file(self, node: Address | None) -> Path:
        """Where the events of a node of a real run are written; None is the launcher."""
        name = "launcher" if node is None else node_name(node).replace(" ", "-")
        return self.path / "events" / f"{name}.jsonl"

    def read_events(self) -> list[Event]:
        """All events that are on disk by now, sorted by time; none where there is no file yet."""
        if self.events_file.is_file():
            files: Iterable[Path] = [self.events_file]
        else:
            files = sorted((self.path / "events").glob("*.jsonl"))
        return sorted((event for file in files for event in read_event_file(file)), key=time_of)

    def merge_events(self) -> list[Event]:
        """Join the nodes' files into events.jsonl and remove them; return all events, sorted by time."""
        events = self.read_events()
        encoder = msgspec.json.Encoder()
        try:
            write_whole(self.events_file, encoder.encode_lines(events))
        except OSError as error:
            if error.errno not in FULL:
                raise
            say_full(self.events_file, error, f"the events stay in {self.path / 'events'}")
            return events
        for file in (self.path / "events").glob("*.jsonl"):
            file.unlink()
        if (self.path / "events").exists():
            (self.path / "events").rmdir()
        return events

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json; from then on the run counts as ended."""
        replace(self.summary_file, msgspec.json.format(msgspec.json.encode(summary), indent=2))

    def read_summary(self) -> Summary:
        """Read summary.json; where there is none, the summary of the events so far, as an interrupted run's."""
        if not self.summary_file.is_file():
            why = "the run ended without a summary"
            if _gone(self.summary_file):  # of a run whose disk was full
                why = f"the summary of the run is gone: it was in {self.summary_file.readlink()}"
            return summarise(self.read_config(), self.read_events(), "interrupted", why)
        try:
            return msgspec.json.decode(self.summary_file.read_bytes(), type=Summary)
        except ValueError as error:  # msgspec's own errors are ValueErrors, and so is text that is not UTF-8
            raise ConfigurationError(
                f"{self.summary_file} is not readable: {error}; delete it to have it computed anew"
            ) from None

    def read(self) -> Record:
        """Configuration, summary and events."""
        return Record(self.read_config(), self.read_summary(), self.read_events())

    def write_result(self, params: FlatArray, schema: Schema) -> None:
        """Write the resulting model: flat parameters (K,), or (M, K) of an ensemble, and the table of what lies where.

        Raises:
            SchemaMismatch: `params` does not have the table's size and dtype.
        """
        _require(params, schema, "the result")
        replace(self.path / "schema.json", msgspec.json.encode({"dtype": schema.dtype, "entries": schema.entries}))
        replace(self.result_file, lambda file: np.save(file, params, allow_pickle=False))

    def read_result(self) -> tuple[FlatArray, Schema]:
        """The resulting model's flat parameters (K,), or (M, K) of an ensemble, and their table.

        Raises:
            ConfigurationError: the run left no result, or a file of it is damaged.
            SchemaMismatch: the two files do not belong together.
        """
        for file in (self.result_file, self.path / "schema.json"):
            if _gone(file):
                raise ConfigurationError(f"{file} is gone: it was in {file.readlink()}; repeat the run")
            if not file.is_file():
                raise ConfigurationError(f"{self.path} holds no result; the run did not end, repeat it")
        schema = _undamaged(self.path / "schema.json", lambda file: msgspec.json.decode(file.read_bytes(), type=Schema))
        params = _undamaged(self.result_file, lambda file: np.load(file, allow_pickle=False))
        _require(params, schema, str(self.path / "result.npy"))
        return params, schema

    def _computed(self) -> str | None:
        """What kind of run the folder holds; None where there is none, or it ended before its first step."""
        if not self.config_file.exists():
            return None
        try:
            summary = self.read_summary()
        except ConfigurationError:
            return "a damaged"
        if (
            not summary.steps
            and not self.result_file.exists()
            and not any(map(_gone, (self.summary_file, self.result_file)))
        ):
            return None
        return f"{'an' if summary.status == 'interrupted' else 'a'} {summary.status}"

    def _status(self) -> str | None:
        """The status in summary.json; None where there is no readable one."""
        if not self.summary_file.is_file():
            return None
        try:
            return str(msgspec.json.decode(self.summary_file.read_bytes())["status"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _clear(self) -> None:
        """Remove the files that a run writes, and no other; config.toml stays, so that this is still a run's folder."""
        names = ("summary.json", "events.jsonl", "result.npy", "schema.json")
        halves = self.path.glob(f"*{HALF}")
        for file in [*(self.path / name for name in names), *halves, *(self.path / "events").glob("*.jsonl")]:
            file.unlink(missing_ok=True)
        shutil.rmtree(self.path / SNAPSHOTS, ignore_errors=True)


def _undamaged(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise ConfigurationError(f"{path} is damaged: {error}; repeat the run to have it written anew") from None


def _gone(file: Path) -> bool:
    """Whether this is a link to a file that a full disk did not take, and that file is not there any more."""
    return file.is_symlink() and not file.is_file()


def _may_go(file: Path) -> bool:
    """Whether a run that was killed before it had written its configuration may have left this file."""
    return file.suffix == HALF or file.name == OWNER


def read_event_file(path: Path) -> list[Event]:
    """The events in one file, in the order in which they were written; a half-written last line is left out.

    Raises:
        ConfigurationError: a line before the last is broken.
    """
    data = path.read_bytes()
    whole, _, rest = data.rpartition(b"\n")
    try:
        events: list[Event] = _decoder.decode_lines(whole)
    except ValueError:
        events = [_decode(line, path, number) for number, line in enumerate(whole.split(b"\n"), 1)]
    try:
        return [*events, _decode(rest, path, len(events) + 1)] if rest else events
    except ConfigurationError:
        return events


def _decode(line: bytes, path: Path, number: int) -> Event:
    try:
        event: Event = _decoder.decode(line)
        return event
    except ValueError as error:
        try:
            return _not_finite(msgspec.json.decode(line))
        except (ValueError, AttributeError):
            raise ConfigurationError(
                f"line {number} of {path} is no event: {error}; delete that line to read the rest"
            ) from None


def _not_finite(data: dict[str, Any]) -> Event:
    """An evaluation or a figure with a number that was not finite: JSON has no such, so it was written as null."""
    kinds: dict[str, tuple[type[Event], tuple[str, ...]]] = {
        "evaluation": (Snapshot, ("loss", "metric")),
        "replica": (Replica, ("loss", "metric")),
        "figure": (Figure, ("value",)),
    }
    if data.get("type") not in kinds:
        raise msgspec.ValidationError
    kind, names = kinds[data["type"]]
    event: Event = msgspec.convert({**data, **{k: float("nan") for k in names if data.get(k) is None}}, kind)
    return event


def _remove_half_line(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        data = file.read()
        file.truncate(data.rfind(b"\n") + 1)


def _require(params: FlatArray, schema: Schema, who: str) -> None:
    if params.shape[-1:] != (schema.size,) or params.ndim > 2 or params.dtype != np.dtype(schema.dtype):
        raise SchemaMismatch(
            f"{who} has shape {params.shape} and dtype {params.dtype} where the schema says ({schema.size},) and "
            f"{schema.dtype}, a row for each member of an ensemble; write both of the same model"
        )
