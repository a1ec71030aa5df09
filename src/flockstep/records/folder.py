"""A run's folder: config.toml, events.jsonl, summary.json, result.npy, schema.json and buffers.safetensors.

During a real run the launcher writes the events of each node to a separate file (events/worker-0.jsonl,
events/server-0.jsonl, events/launcher.jsonl). `merge_events` joins these files into events.jsonl, sorted by time.
Readers accept both layouts, missing files, and the incomplete last line of a killed process.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import safetensors.numpy as safetensors
from safetensors import SafetensorError

from flockstep.arrays.schema import FlatArray, Schema
from flockstep.errors import ConfigurationError, RunError, SchemaMismatch, require
from flockstep.messages import Address, node_name
from flockstep.records import owner
from flockstep.records.access import HALF, file_of, make_folder, open_file, set_readers, write_whole
from flockstep.records.checkpoints import CHECKPOINTS
from flockstep.records.config import RunConfig
from flockstep.records.events import (
    HELD_BACK,
    EvaluationEvent,
    Event,
    LostEvent,
    MetricEvent,
    NoteEvent,
    ReplicaEvent,
    ResultEvent,
    ScalarEvent,
    StepEvent,
)
from flockstep.records.flight import FLIGHT, FlightEvent, read_flight
from flockstep.records.owner import OWNER, owned
from flockstep.records.snapshots import SNAPSHOTS
from flockstep.records.summary import LACKS, Summary, summarize, time_of
from flockstep.records.tape import TAPES

T = TypeVar("T")

FUNCTION = "function"
"""Name of the subfolder that holds the program and the results of a launched function."""
BUFFERS = "buffers.safetensors"
"""Name of the file with the buffers of the resulting model that training changes, such as running statistics."""
ENDED = ("finished", "diverged")
"""Statuses of runs that have ended and need not be repeated."""
_DAMAGE = (
    *(OSError, ValueError, TypeError, OverflowError, RecursionError, SyntaxError, MemoryError, TokenError, Warning),
    SafetensorError,
)
_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


@dataclass(frozen=True)
class Record:
    """The whole record of a run: configuration, summary and events, from which tables, reports and tests are made."""

    config: RunConfig
    summary: Summary
    events: list[Event]
    flight: dict[str, list[FlightEvent]] = field(default_factory=dict)
    """Name of a node → the last events before each fault, from the node's flight recorder."""


class EventWriter:
    """Appends events to a file, one JSON document per line.

    Up to `flush_every` - 1 steps, updates and spans are buffered; every other event is written at once, together with
    the buffered events. Written events survive the death of the process. An incomplete last line of an earlier writer
    is removed.
    """

    def __init__(self, path: Path | str, flush_every: int = 8):
        require(flush_every >= 1, "flush_every", ">= 1", flush_every, "use 1 to write every event at once")
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._held = 0
        self._flush_every = flush_every
        self._path = Path(path)
        make_folder(self._path.parent)
        _remove_half_line(self._path)
        self._file = open_file(self._path, "ab", buffering=0)

    def write(self, event: Event) -> None:
        """Append one event to the file of events."""
        self._encoder.encode_into(event, self._buffer, -1)
        self._buffer += b"\n"
        self._held += 1
        if self._held >= self._flush_every or not isinstance(event, HELD_BACK):
            self.flush()

    def flush(self) -> None:
        """Write the buffered events to the file; raise `RunError` if the disk does not accept them."""
        self._held = 0
        try:
            while self._buffer:
                taken = self._file.write(self._buffer)
                del self._buffer[:taken]
        except OSError as error:
            self._buffer.clear()  # a line whose end did not fit would make later ones unreadable
            _remove_half_line(self._path)
            raise RunError(
                f"{self._path} could not be written: {error.strerror}; free space on its disk, and continue from the "
                f"last checkpoint with flockstep resume {self._path.parent.parent}"
            ) from None

    def close(self) -> None:
        """Flush and close the file; closing the file again has no effect."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class RunFolder:
    """The record of one run on disk. Creating a `RunFolder` reads and writes nothing."""

    path: Path

    def __init__(self, path: Path | str):
        object.__setattr__(self, "path", Path(path))

    @property
    def config_file(self) -> Path:
        """Path of config.toml, the resolved configuration."""
        return self.path / "config.toml"

    @property
    def events_file(self) -> Path:
        """Path of events.jsonl: all events of a simulation, or of a real run that has ended."""
        return self.path / "events.jsonl"

    @property
    def summary_file(self) -> Path:
        """Path of summary.json, the summary of the run."""
        return self.path / "summary.json"

    @property
    def result_file(self) -> Path:
        """Path of result.npy, the flat parameters of the resulting model."""
        return self.path / "result.npy"

    @contextlib.contextmanager
    def created(self, config: RunConfig, overwrite: bool = False) -> Iterator[None]:
        """Context manager that owns the folder and prepares it for `config`; a folder with files that are no run is
        refused, and one with the results of a run unless `overwrite` is set.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ConfigurationError(f"{self.path} is a file, not a folder; choose another folder for the run")
        # A run that was killed before it wrote its configuration may have left half-written files and the owner's.
        present = [*self.path.iterdir()] if self.path.exists() and not self.config_file.exists() else []
        if any(file.suffix != HALF and file.name != OWNER for file in present):
            raise ConfigurationError(f"{self.path} contains files but no run; choose an empty or a new folder")
        with owned(self.path):
            if self.config_file.exists() and not overwrite:
                what = "a damaged"
                with contextlib.suppress(ConfigurationError):
                    summary = self.read_summary()
                    what = f"{'an' if summary.status == 'interrupted' else 'a'} {summary.status}"
                    what = what if summary.steps or summary.status == "finished" else ""  # ended before its first step
                if what:
                    raise ConfigurationError(
                        f"{self.path} holds {what} run; choose another folder with --out, or replace it with "
                        "--overwrite"
                    )
            self._clear()
            set_readers(self.path, bool(config.shared))
            self.write_config(config)
            yield

    @contextlib.contextmanager
    def resumed(
        self, seconds: float, steps: Mapping[Address, int], held: bool = False
    ) -> Iterator[tuple[int, list[str]]]:
        """Context manager that owns the folder of a run that continues from its state at `seconds`.

        Events after this time are dropped, except a metric that a script recorded after the last step of the state,
        because the script continues behind that place. Yields the number of steps among them, and sentences about the
        steps whose events the record has lost from before this time.

        `steps`: rank → number of steps that the worker had taken. `held`: whether the caller already owns the folder.
        """
        with contextlib.nullcontext() if held else owned(self.path):
            events = self.read_events()
            ends = {(event.seconds, event.step) for event in events if isinstance(event, ResultEvent)}

            def stays(event: Event) -> bool:
                # The evaluation of the result that was chosen when the run ended early goes with the result.
                if isinstance(event, ResultEvent | ReplicaEvent):
                    return False
                if isinstance(event, EvaluationEvent) and (event.seconds, event.step) in ends:
                    return False
                behind = isinstance(event, MetricEvent) and event.step <= steps.get(event.rank, -1)
                return time_of(event) <= seconds or behind

            kept = list(filter(stays, events))
            dropped = sum(isinstance(event, StepEvent) and not stays(event) for event in events)
            write_whole(self.events_file, msgspec.json.Encoder().encode_lines(kept))
            for file in (self.path / "events").glob("*.jsonl"):
                file.unlink()
            self._clear(but=self.events_file)
            make_folder(self.path / "events")
            self.events_file.replace(self.path / "events" / "before.jsonl")
            changed = any((self.path / CHECKPOINTS).glob("*.toml"))  # a configuration for each number of workers
            yield dropped, _lost_steps(kept, steps, changed)

    def set_aside(self, workers: Iterable[int], change: int) -> None:
        """Rename the files of workers that the run no longer has, or has under another rank, after its `change`th
        change; whoever writes them goes on.
        """
        for rank in workers:
            file = self.node_events_file(rank)
            if file.exists():
                file.rename(file.with_name(f"before-{change}-{file.name}"))

    @property
    def unfinished(self) -> bool:
        """Return whether the folder holds no finished run, so that the run must be repeated."""
        try:
            return msgspec.json.decode(self.summary_file.read_bytes())["status"] not in ENDED
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # missing or unreadable
            return True

    def check_whole(self, nodes: Iterable[Address | None] = ()) -> None:
        """Raise `RunError` if the folder, or a file of this process or of the given nodes, was removed."""
        owner.check(self.path)
        for file in (self.config_file, *map(self.node_events_file, nodes)):
            if not file.exists():
                raise RunError(
                    f"{file} was removed during its run, so the record is incomplete; repeat the run with --overwrite"
                )

    @property
    def begun(self) -> int | None:
        """Time at which the run in the folder was started, in nanoseconds; None if there is no run."""
        return self.config_file.stat().st_mtime_ns if self.config_file.exists() else None

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration to config.toml."""
        write_whole(self.config_file, config.to_toml().encode())

    def read_config(self) -> RunConfig:
        """Read the configuration from config.toml; refuse a folder that holds no run."""
        if not self.config_file.is_file():
            raise no_run(self.path)
        return RunConfig.from_toml(
            self.config_file.read_text(encoding="utf-8", errors="replace"), str(self.config_file)
        )

    def node_events_file(self, node: Address | None) -> Path:
        """Return the path of the events file of one node of a real run; None stands for the launcher."""
        return self.path / "events" / f"{file_of(node)}.jsonl"

    def note(self, seconds: float, texts: Iterable[str], lost: Iterable[LostEvent] = ()) -> None:
        """Add sentences about a real run, and the nodes without which it continues, to the launcher's events."""
        with EventWriter(self.node_events_file(None)) as events:
            for text in texts:
                events.write(NoteEvent(seconds, text))
            for one in lost:
                events.write(msgspec.structs.replace(one, seconds=seconds))

    def read_events(self) -> list[Event]:
        """Return all events on disk, sorted by time; an empty list if no file exists yet."""
        if self.events_file.is_file():
            files: Iterable[Path] = [self.events_file]
        else:
            files = sorted((self.path / "events").glob("*.jsonl"))
        return sorted((event for file in files for event in read_event_file(file)), key=time_of)

    def merge_events(self) -> list[Event]:
        """Join the nodes' files into events.jsonl and remove the nodes' files; return all events, sorted by time."""
        events = self.read_events()
        try:
            write_whole(self.events_file, msgspec.json.Encoder().encode_lines(events))
        except OSError:  # the disk has no room for them twice, and readers accept the nodes' files
            return events
        for file in (self.path / "events").glob("*.jsonl"):
            file.unlink()
        if (self.path / "events").exists():
            (self.path / "events").rmdir()
        return events

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json, which marks the run as ended."""
        write_whole(self.summary_file, msgspec.json.format(msgspec.json.encode(summary), indent=2))

    def read_summary(self) -> Summary:
        """Read summary.json; if the file is missing, summarize the events on disk as an interrupted run."""
        if not self.summary_file.is_file():
            why = "the run ended without a summary in the record"
            return summarize(self.read_config(), self.read_events(), "interrupted", why)
        try:
            return msgspec.json.decode(self.summary_file.read_bytes(), type=Summary)
        except (ValueError, RecursionError) as error:  # msgspec's own are ValueErrors, and so is text that is not UTF-8
            raise ConfigurationError(
                f"{self.summary_file} cannot be read: {error}; delete this file, and flockstep computes the summary "
                "again"
            ) from None

    def read(self) -> Record:
        """Return the whole record: configuration, summary and events."""
        return Record(self.read_config(), self.read_summary(), self.read_events(), read_flight(self.path))

    def write_result(
        self, params: FlatArray, schema: Schema, buffers: Mapping[str, FlatArray] = MappingProxyType({})
    ) -> None:
        """Write the resulting model: flat parameters (K,), or (M, K) of an ensemble, their schema, and the buffers by
        name.
        """
        _require(params, schema, "the result")
        if buffers:
            write_whole(self.path / BUFFERS, safetensors.save({name: one.copy() for name, one in buffers.items()}))
        write_whole(self.path / "schema.json", msgspec.json.encode({"dtype": schema.dtype, "entries": schema.entries}))
        write_whole(self.result_file, lambda file: np.save(file, params, allow_pickle=False))

    def read_result(self) -> tuple[FlatArray, Schema]:
        """Read the resulting model, as `write_result` wrote it; a missing or damaged one is refused."""
        for file in (self.result_file, self.path / "schema.json"):
            if not file.is_file():
                raise ConfigurationError(f"{self.path} contains no result, because the run did not end; repeat the run")
        schema = _undamaged(self.path / "schema.json", lambda file: msgspec.json.decode(file.read_bytes(), type=Schema))
        params = _undamaged(self.result_file, _array_of)
        _require(params, schema, str(self.path / "result.npy"))
        return params, schema

    def read_buffers(self) -> dict[str, FlatArray]:
        """Read the buffers of the resulting model: name → array; empty if training changes none."""
        file = self.path / BUFFERS
        return _undamaged(file, lambda file: safetensors.load(file.read_bytes())) if file.is_file() else {}

    def _clear(self, but: Path | None = None) -> None:
        """Remove what a run writes, except config.toml; with `but`, that file, checkpoints and tapes stay, too."""
        for pattern in (
            "summary.json",
            "events.jsonl",
            "result.npy",
            "schema.json",
            BUFFERS,
            f"*{HALF}",
            "events/*.jsonl",
        ):
            for file in self.path.glob(pattern):
                if file != but:
                    file.unlink(missing_ok=True)
        for pattern in (
            SNAPSHOTS,
            FLIGHT,
            FUNCTION,
            "distribute-*",
            *([] if but is not None else [CHECKPOINTS, TAPES]),
        ):
            for folder in self.path.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)


def no_run(folder: Path, wanted: str = "the folder of a run") -> ConfigurationError:
    """Return the error for a folder that does not contain the run that it should contain."""
    if not folder.exists():
        return ConfigurationError(f"there is no folder {folder}; name {wanted}")
    return ConfigurationError(f"{folder} contains no run: config.toml is missing; name {wanted}")


def _lost_steps(events: Sequence[Event], steps: Mapping[Address, int], changed: bool) -> list[str]:
    """Sentences about workers of whose first `steps` steps the events are missing, unless an event says so already.

    If the number of workers has `changed`, nothing is said: steps are counted anew then, and their numbers have gaps.
    """
    if changed:
        return []
    recorded: dict[int, set[int]] = {rank: set() for rank in steps}
    for event in events:
        if isinstance(event, StepEvent) and event.step <= steps.get(event.rank, 0):
            recorded[event.rank].add(event.step)
    said = {event.text for event in events if isinstance(event, NoteEvent)}
    found = []
    for rank, there in recorded.items():
        if lost := steps[rank] - len(there):
            text = f"{LACKS} the events of {lost} steps of {node_name(rank)}, which were lost before the run "
            text += "was resumed; figures made from events, such as completeness, lack these steps"
            found += [text] if text not in said else []
    return found


def _undamaged(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except _DAMAGE as error:
        raise ConfigurationError(f"{path} is damaged: {error}; repeat the run to write a new file") from None


def _array_of(path: Path) -> FlatArray:
    """The array in a file of numpy, whose header may announce no more and no less than the file holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # about headers that numpy does not write
        with path.open("rb") as file:
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            if not header(file)[2].itemsize:  # numpy divides by it
                raise ValueError("its header declares elements without bytes")
        mapped = np.lib.format.open_memmap(path, mode="r")  # allocates nothing for a wrong header
    if mapped.offset + mapped.nbytes != path.stat().st_size:
        raise ValueError(f"its header declares an array of shape {mapped.shape} and dtype {mapped.dtype}")
    return np.array(mapped)


def read_event_file(path: Path) -> list[Event]:
    """Return the events in one file, in the order in which they were written; an incomplete last line is skipped."""
    data = path.read_bytes()
    whole, _, rest = data.rpartition(b"\n")
    events = decode_events(whole, path)
    try:
        return [*events, _decode(rest, path, len(events) + 1)] if rest else events
    except ConfigurationError:
        return events


def decode_events(lines: bytes, path: Path) -> list[Event]:
    """Return the events in complete lines of the file `path`; refuse a line that is no event."""
    try:
        return _decoder.decode_lines(lines)
    except (ValueError, RecursionError):
        return [_decode(line, path, number) for number, line in enumerate(lines.split(b"\n"), 1)]


def _decode(line: bytes, path: Path, number: int) -> Event:
    try:
        event: Event = _decoder.decode(line)
        return event
    except (ValueError, RecursionError) as error:
        with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
            return _not_finite(msgspec.json.decode(line))
        raise ConfigurationError(
            f"line {number} of {path} is not an event: {error}; delete this line to read the rest of the file, or read "
            "the record with the version of flockstep that wrote it"
        ) from None


def _not_finite(data: dict[str, Any]) -> Event:
    """Decode an evaluation or scalar with numbers that were not finite: JSON has none, so they were written as null."""
    kinds: dict[str, tuple[type[Event], tuple[str, ...]]] = {
        "evaluation": (EvaluationEvent, ("loss", "metric")),
        "replica": (ReplicaEvent, ("loss", "metric")),
        "scalar": (ScalarEvent, ("value",)),
        "metric": (MetricEvent, ("value",)),
    }
    if not isinstance(data["type"], str) or data["type"] not in kinds:
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
            f"{who} has shape {params.shape} and dtype {params.dtype}, but the schema says ({schema.size},), with one "
            f"row for each member of an ensemble, and {schema.dtype}; write result and schema of the same model"
        )
