"""Repeats what a tape says: lets messages enter a node's program in the order of a recorded run, and compares."""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import Interrupted, RunError
from flockstep.messages import LAUNCHER, Address, Message, Wanted, node_name
from flockstep.nodes import Node
from flockstep.records.tape import (
    GradientEntry,
    MessageEntry,
    Reading,
    Said,
    SnapshotEntry,
    TapeEntry,
    read_tape,
    tape_file,
)
from flockstep.runtime.member import PATIENCE, SAID, Member, stopped
from flockstep.runtime.tape import Tape, block_bytes, checksums, tick_number

OF_TAPE = frozenset({"left", "lost"})
"""What the supervisor says that changes programs; a script that is repeated hears it from the tape."""
E = TypeVar("E", Reading, GradientEntry, SnapshotEntry)


class TapeEnded(Interrupted):
    """Raised where a node's tape ends, because its process was killed there or its part in the run ended."""


@dataclass(frozen=True)
class Difference:
    """The first difference between a replay and its run."""

    node: Address
    step: int
    what: str

    def __str__(self) -> str:
        return f"{node_name(self.node)} at step {self.step}: {self.what}"


@dataclass(frozen=True)
class Agreement:
    """Parameters of a node that were equal to those of the run: after `step` steps of the node."""

    node: Address
    step: int
    digest: str
    """Eight hexadecimal digits of the parameters' checksums."""


class MessageSource(Protocol):
    """Where a follower gets the messages that its tape names, and whom it tells what it finds."""

    def message(self, entry: MessageEntry) -> Message:
        """Wait for the next message of a node, and return it."""

    def before_gradient(self, node: Node) -> None:
        """Wait until the node may use its next gradient."""

    def at_turn(self, node: Node, place: int) -> None:
        """Note that the node is about to leave a place."""

    def differ(self, difference: Difference) -> Exception:
        """Note the first difference, and return the error that ends the program that found it."""

    def agree(self, agreement: Agreement | None) -> None:
        """Note parameters that were equal; None: a gradient."""


class Follower(Tape):
    """Gives a node's program what its tape says."""

    def __init__(self, source: MessageSource, tape: Path, said: Callable[[str, Any], Any]):
        """`said` returns the note of what the supervisor has said on the tape, for this replay; None: nothing."""
        self._source, self._said = source, said
        self.header, self._entries = read_tape(tape)
        self._entry = next(self._entries, None)
        self.place = 0
        self._node: Node
        self._take: Callable[[Message], None]

    def begin(self, node: Node, take: Callable[[Message], None]) -> None:
        self._node, self._take = node, take

    @property
    def ended(self) -> bool:
        """Whether nothing is left on the tape."""
        return self._entry is None

    def next(self) -> Message | None:
        """Return the next message that enters at this place, as soon as it was sent; None if none does."""
        while isinstance(entry := self._entry, MessageEntry | Said) and entry.place == self.place:
            if isinstance(entry, MessageEntry):
                message = self._source.message(entry)
                self._entry = next(self._entries, None)
                if message.number != entry.number:
                    raise self._differs(
                        f"message {message.number} of {node_name(entry.source)} came where the run had message "
                        f"{entry.number}"
                    )
                return message
            self._entry = next(self._entries, None)
            kind: Any = SAID.get(entry.tag, dict[str, int | float | str])
            if (note := self._said(entry.tag, msgspec.json.decode(entry.text, type=kind))) is not None:
                return Message(LAUNCHER, entry.tag, note=note)
        return None

    def heard(self, message: Message) -> None:
        """Do nothing, because the tape says what enters."""

    def turn(self) -> None:
        while (message := self.next()) is not None:
            self._take(message)
        self._source.at_turn(self._node, self.place)
        self.place += 1

    def reading(self, clock: Callable[[], float]) -> float:
        return self._expected(Reading, "it reads the clock").seconds

    def gradient(self, loss: float | None, gradient: FlatArray) -> None:
        self._source.before_gradient(self._node)
        entry = self._expected(GradientEntry, "it has computed a gradient")
        if repr(entry.loss) != repr(loss):  # two losses that are not numbers are equal
            raise self._differs(f"the loss is {loss!r}, and was {entry.loss!r}")
        self._compare("the gradient differs", entry.checks, gradient)
        self._source.agree(None)

    def snapshot(self, tick: float, step: int, params: FlatArray) -> None:
        entry = self._expected(SnapshotEntry, "its parameters are evaluated")
        if (entry.tick, entry.step) != (tick_number(tick), step):
            was = f"the run had evaluation {entry.tick} after step {entry.step}"
            raise self._differs(f"evaluation {tick:g} came after step {step}, where {was}")
        self._compare("the parameters differ", entry.checks, to_host(params))
        digest = f"{zlib.crc32(repr(entry.checks).encode()):08x}"
        self._source.agree(Agreement(self.header.node, step, digest))

    def flush(self) -> None:
        """Do nothing, because the tape is only read."""

    def close(self) -> None:
        """Do nothing, because the tape is only read."""

    def wait_in_vain(self, what: str) -> Exception:
        """Return the error of a program that waits at the end of its tape, or where the run's did not wait."""
        if self._entry is None:
            return TapeEnded(f"the tape of {node_name(self.header.node)} ends here")
        return self._differs(f"it waits for {what}, where the run had {_named(self._entry)}")

    def fail(self, reason: str) -> None:
        """The program has failed, which is a difference unless the run ended here too."""
        if not self.ended:
            self._differs(f"it failed: {reason}")

    def _expected(self, kind: type[E], what: str) -> E:
        """Return the next entry, which must be of a kind."""
        if (entry := self._entry) is None:
            raise TapeEnded(f"the tape of {node_name(self.header.node)} ends here")
        if not isinstance(entry, kind) or entry.place != self.place:
            raise self._differs(f"{what}, where the run had {_named(entry)}")
        self._entry = next(self._entries, None)
        return entry

    def _compare(self, what: str, was: tuple[int, ...], array: FlatArray) -> None:
        now = tuple(checksums(array).tolist())  # none on either side for a gradient on a GPU
        for number, (old, new) in enumerate(zip(was, now, strict=bool(was and now))):
            if old != new:
                size = block_bytes(array.nbytes) // array.itemsize
                first, last = number * size, min((number + 1) * size, len(array)) - 1
                raise self._differs(f"{what} in elements {first} to {last}{self._tensor_of(first)}")

    def _tensor_of(self, element: int) -> str:
        """The tensor of an element, for a sentence."""
        schema, at = self._node.schema, self._node.held.start + element
        entries = () if schema is None else schema.entries
        return next((f" ({one.name} and on)" for one in entries if one.offset <= at < one.offset + one.size), "")

    def _differs(self, what: str) -> Exception:
        return self._source.differ(Difference(self.header.node, self._node.run_step, what))


def _named(entry: TapeEntry) -> str:
    match entry:
        case MessageEntry():
            return f"message {entry.number} of {node_name(entry.source)}"
        case Said():
            return f"{entry.tag!r} of the supervisor"
        case Reading():
            return "a reading of the clock"
        case GradientEntry():
            return "a gradient"
    return f"the evaluation after step {entry.step}"


class FollowingMember(Member, MessageSource):
    """The membership of a script's process that repeats a run: messages are held back until their turn on the tape.

    The supervisor speaks for itself, except where its word changes a program: there the tape's counts.
    """

    def begin(self) -> None:
        super().begin()
        path = tape_file(Path(self.node_spec.follows), self.node_spec.address)
        self._held: defaultdict[Address, deque[Message]] = defaultdict(deque)
        self._spoken: deque[Message] = deque()
        self.tape = self._follower = Follower(self, path, self._said)

    def receive(self, seconds: float | None, also: int | None = None, wanted: Wanted | None = None) -> Message | None:
        if self.tape is None:
            return super().receive(seconds, also, wanted)
        self._hold(0)
        if self._spoken:
            return self._spoken.popleft()
        if (message := self._follower.next()) is None and seconds != 0:
            if wanted is not None:
                raise self._follower.wait_in_vain(str(wanted))
            self._hold(seconds)
        return message

    def message(self, entry: MessageEntry) -> Message:
        queue = self._held[entry.source]
        while not queue:
            self._hold(PATIENCE)
        return queue.popleft()

    def before_gradient(self, node: Node) -> None:
        """Do nothing, because scripts do not wait."""

    def at_turn(self, node: Node, place: int) -> None:
        """Do nothing, because nobody looks at scripts."""

    def differ(self, difference: Difference) -> Exception:
        return RunError(f"the replay differs from the run, first here: {difference}")

    def agree(self, agreement: Agreement | None) -> None:
        """Do nothing, because the script's result is compared."""

    def _said(self, tag: str, note: Any) -> Any:
        return note if tag in OF_TAPE else None

    def _hold(self, seconds: float | None) -> None:
        """Keep what has arrived, and wait for it for up to `seconds`."""
        while (message := super().receive(seconds)) is not None:
            seconds = 0
            if message.source != LAUNCHER:
                self._held[message.source].append(message)
            elif message.tag == "stop":  # at once, because the awaited message may never come
                raise stopped(message)
            elif message.tag not in OF_TAPE:
                self._spoken.append(message)
