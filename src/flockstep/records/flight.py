"""The flight recorder: the last events of each process, which are written to the run's folder when a fault occurs.

Every process of a run keeps its last messages, waits and steps in memory. When a node is lost or fails, a gradient is
refused or a deadline has passed, the processes send these events to the launcher, which appends them to
flight/NODE.jsonl. A process that was killed sends none; the recorders of the other processes show the last messages
that they received from the killed process.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.messages import Address, node_name
from flockstep.records.access import file_of, make_folder, open_file
from flockstep.records.events import LostEvent

FLIGHT = "flight"
"""Name of the folder, within the folder of a run, with the flight recorders of the run's processes."""
KEPT = 2000
"""Number of last events that a process keeps in memory."""
MOST = 200
"""Largest number of flight-recorder events in one message."""
Kind = Literal["send", "receive", "wait", "step"]


class FlightEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An event of one process, which has sent or received a message, begun to wait, or finished a step."""

    seconds: float
    """Seconds from the start of the run to the event."""
    kind: Kind
    peer: int | None
    """The other node of a message; None for the launcher, for steps, and if any node may send the awaited message."""
    tag: str
    step: int
    """Number of steps that this node has taken so far."""
    nbytes: int = 0
    """Size of the message's array in bytes."""


class FlightRecorder:
    """The recorder in one process, which keeps the process's last events in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """`clock` returns the seconds that `taken` converts."""
        self._clock = clock
        self._events: deque[tuple[float, Kind, Address | None, str, int, int]] = deque(maxlen=KEPT)

    def note(self, kind: Kind, peer: Address | None, tag: str, step: int, nbytes: int = 0) -> None:
        """Store an event; if `KEPT` events are stored, the new event replaces the oldest."""
        self._events.append((self._clock(), kind, peer, tag, step, nbytes))

    def taken(self, convert: Callable[[float], float] = lambda seconds: seconds) -> list[FlightEvent]:
        """Return the events since the last call; `convert` makes seconds of the run of the process's clock."""
        found = [FlightEvent(convert(event[0]), *event[1:]) for event in self._events]
        self._events.clear()
        return found


def encoded(events: list[FlightEvent]) -> Iterable[bytes]:
    """Yield the payloads of messages that together contain the events."""
    for start in range(0, len(events), MOST):
        yield msgspec.msgpack.encode(events[start : start + MOST])


def decoded(payload: bytes | memoryview) -> list[FlightEvent]:
    """Return the events that the payload of a message contains."""
    try:
        return msgspec.msgpack.decode(payload, type=list[FlightEvent])
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the flight recorder of this process cannot be read: {error}") from None


def append(record: Path, node: Address | None, events: list[FlightEvent]) -> None:
    """Append events to the flight recorder of a node; None stands for the launcher."""
    if events:
        file = record / FLIGHT / f"{file_of(node)}.jsonl"
        make_folder(file.parent)
        with open_file(file, "ab") as lines:
            lines.write(msgspec.json.Encoder().encode_lines(events))


def read_flight(record: Path) -> dict[str, list[FlightEvent]]:
    """Return a mapping from the name of a node, or "launcher", to its events, oldest first."""
    found = {}
    for file in sorted((record / FLIGHT).glob("*.jsonl")):
        try:
            whole, _, _ = file.read_bytes().rpartition(b"\n")
            found[file.stem.replace("-", " ")] = msgspec.json.Decoder(FlightEvent).decode_lines(whole) if whole else []
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{file} is not a file of a flight recorder: {error}; delete this file to read the other files"
            ) from None
    return found


def last_heard(flights: Mapping[str, list[FlightEvent]], lost: LostEvent) -> list[str]:
    """Return sentences that say who received a lost node's last message, and who waited for it in the end."""
    before = {name: [one for one in events if one.seconds <= lost.seconds] for name, events in flights.items()}
    received = [(one, name) for name, events in before.items() for one in events if one.kind == "receive"]
    heard, said = [(one, name) for one, name in received if one.peer == lost.node], []
    if heard:
        last, name = max(heard, key=lambda pair: pair[0].seconds)
        said.append(
            f"{name} received the last message of {node_name(lost.node)}, {last.tag!r}, at its own step {last.step}, "
            f"{lost.seconds - last.seconds:.2f} s before {node_name(lost.node)} was declared lost"
        )
    for name, events in before.items():
        others = [one for one in events if one.kind != "send"]
        if others and others[-1].kind == "wait" and others[-1].peer in (lost.node, None) and name != "launcher":
            wait = others[-1]
            said.append(f"{name} waited for {wait.tag} at step {wait.step}, for {lost.seconds - wait.seconds:.2f} s")
    return said
