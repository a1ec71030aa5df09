"""`flockstep flight`: shows what the flight recorders of a run's processes have recorded."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flockstep.cli import show
from flockstep.errors import ConfigurationError, printable
from flockstep.messages import node_name
from flockstep.records.flight import FlightEvent, last_heard
from flockstep.records.folder import Record, RunFolder

SHOWN = 12
"""Number of last events that are shown for each process."""


def show_flight(folder: Path, as_json: bool) -> None:
    """Print what is known about each lost node, then the last events of every process; with `as_json`, all events."""
    record = RunFolder(folder).read()
    if as_json:
        flights = {name: msgspec.to_builtins(events) for name, events in record.flight.items()}
        show.json({"folder": str(folder), "lost": lost_nodes(record), "flight": flights})
        return
    if not record.flight:
        raise ConfigurationError(
            f"{folder} holds no flight recorder, because no fault occurred in this run; name another run"
        )
    for sentence in lost_nodes(record):
        print(printable(sentence))
    for name, events in record.flight.items():
        print(f"{printable(name)}: the last {min(SHOWN, len(events))} of {len(events)} events")
        for event in events[-SHOWN:]:
            print(f"  {printable(line(event))}")


def lost_nodes(record: Record) -> list[str]:
    """Return sentences about each lost node: when the node was declared lost, which node received its last message,
    and which nodes waited for the node.
    """
    found = []
    for event in record.summary.lost:
        found.append(f"{event.seconds:.3f} s: {event.reason}")
        found += [f"  {sentence}" for sentence in last_heard(record.flight, event)]
    return found


def line(event: FlightEvent) -> str:
    """Describe an event in one line of text."""
    peer = "" if event.peer is None else node_name(event.peer)
    size = f", {event.nbytes} bytes" if event.nbytes else ""
    what = {
        "send": f"sent {event.tag} to {peer}",
        "receive": f"received {event.tag} from {peer or 'the launcher'}",
        "wait": f"began to wait for {event.tag}",
        "step": "finished a step",
    }[event.kind]
    return f"{event.seconds:.6f} s, step {event.step}: {what}{size}"
