"""Reads the events of a run while the run writes them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from flockstep.records.events import Event
from flockstep.records.folder import RunFolder, decode_events
from flockstep.records.owner import in_use

SECONDS = 0.5
"""Seconds between two reads of the events of a run that has not ended."""
Key = tuple[type[Event], int | None]


def follow(record: RunFolder, pause: Callable[[], None] = lambda: time.sleep(SECONDS)) -> Iterator[list[Event]]:
    """Yield the events in the folder, then the events that are added, until the run has ended; call `pause` in between.

    The events of one node are in order; events of different nodes are not. If the run has ended or was killed, its
    events are yielded at once.

    Raises:
        ConfigurationError: a file holds a line that is not an event.
    """
    read: Counter[Path] = Counter()
    yielded: Counter[Key] = Counter()
    while True:
        ended = record.summary_file.exists() or not in_use(record.path)
        files = sorted((record.path / "events").glob("*.jsonl"))
        events = [event for file in files for event in _added(file, read)]
        yielded.update(map(_key, events))
        if record.events_file.exists():  # the run has merged its files: the first events of each node are known
            merged = _added(record.events_file, read)
            events += [event for event in merged if not _taken(yielded, _key(event))]
        yield events
        if ended:
            return
        pause()


def _added(file: Path, read: Counter[Path]) -> list[Event]:
    """The events in whole lines after the first `read[file]` bytes."""
    try:
        with file.open("rb") as lines:
            lines.seek(read[file])
            whole, newline, _ = lines.read().rpartition(b"\n")
    except FileNotFoundError:  # the run has just merged its files
        return []
    read[file] += len(whole) + len(newline)
    return decode_events(whole, file) if whole else []


def _key(event: Event) -> Key:
    """Kind and node of an event: events of equal keys are in one file."""
    return type(event), getattr(event, "rank", getattr(event, "node", None))


def _taken(counts: Counter[Key], key: Key) -> bool:
    """Whether a count is left, which this call then uses up."""
    counts[key] -= 1
    return counts[key] >= 0
