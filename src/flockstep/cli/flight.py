"""`flockstep flight`: shows what the flight recorders of a run's processes have recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flockstep.cli import options as o
from flockstep.errors import ConfigurationError, printable

if TYPE_CHECKING:
    from flockstep.records.flight import FlightEvent

SHOWN = 12
"""Number of last events that are shown for each process."""


def flight(folder: o.RunFolderArgument, as_json: o.Json = False) -> None:
    """Show what the processes of a run last did before a fault: messages, waits and steps."""
    import msgspec

    from flockstep.cli import show
    from flockstep.records.flight import last_heard
    from flockstep.records.folder import RunFolder

    record = RunFolder(folder).read()
    lost = []
    for loss in record.summary.lost:
        lost += [f"{loss.seconds:.3f} s: {loss.reason}"]
        lost += [f"  {sentence}" for sentence in last_heard(record.flight, loss)]
    if as_json:
        flights = {name: msgspec.to_builtins(events) for name, events in record.flight.items()}
        show.json({"folder": str(folder), "lost": lost, "flight": flights})
        return
    if not record.flight:
        raise ConfigurationError(
            f"{folder} holds no flight recorder, because no fault occurred in this run; name another run"
        )
    for sentence in lost:
        print(printable(sentence))
    for name, events in record.flight.items():
        print(f"{printable(name)}: the last {min(SHOWN, len(events))} of {len(events)} events")
        for event in events[-SHOWN:]:
            print(f"  {printable(line(event))}")


def line(event: FlightEvent) -> str:
    """Describe an event in one line of text."""
    from flockstep.messages import node_name

    peer = "" if event.peer is None else node_name(event.peer)
    size = f", {event.nbytes} bytes" if event.nbytes else ""
    what = {
        "send": f"sent {event.tag} to {peer}",
        "receive": f"received {event.tag} from {peer or 'the launcher'}",
        "wait": f"began to wait for {event.tag}",
        "step": "finished a step",
    }[event.kind]
    return f"{event.seconds:.6f} s, step {event.step}: {what}{size}"
