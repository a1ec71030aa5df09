"""Messages between two nodes, and the mailbox in which messages wait until a program requests them.

Nodes are numbered: workers 0..n-1 by rank, servers -1, -2, … by index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flockstep.arrays.namespace import copied
from flockstep.errors import ProtocolError

Address = int
Array = npt.NDArray[Any]
Fields = Mapping[str, int | float | str]
"""Named values in a message between drivers, in place of the `Note` of a strategy's message."""

HEADER_BYTES = 64
"""Bytes that the virtual network charges for each message's header, counted separately from the payload."""

LEAVE = "leave"
"""Tag of the last message that a node sends."""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the data that a message carries in addition to its array. A strategy defines a subclass for each
    kind of message, and declares the subclasses in `notes`.
    """


AnyNote = Note | Fields
Notes = Mapping[str, type[Note]]
"""Type of a strategy's declaration of notes: a mapping from a message tag with its channel, or "reply to " and a tag,
to the `Note` class of messages with this tag.
"""
NO_NOTES: Notes = {}
"""Empty declaration of notes, for nodes that run no strategy."""


def note_kind(notes: Notes, tag: str, reply_to: int) -> type[Note] | None:
    """Return the `Note` class of the notes that a message carries; None if no note is declared for the message's
    tag.
    """
    return notes.get(f"reply to {tag}" if reply_to else tag)


def server(index: int) -> Address:
    """Return the address of server number `index`."""
    return -1 - index


MASTER: Address = server(0)
PART: Address = 1 << 29
"""Address of part 0 of the worker's own replica, if workers hold parts of a split model. Part i has the address
`PART` + i.
"""


LAUNCHER: Address = 1 << 30
"""Address of the supervisor, the process that launches and watches a run, and coordinates its hosts; agents of hosts
have higher addresses.
"""


@lru_cache(maxsize=1 << 12)
def node_name(address: Address) -> str:
    """Return the name of a node for the user: "worker 3", "server 0", or "part 1" of the worker's own replica."""
    if address >= LAUNCHER:
        return "the supervisor" if address == LAUNCHER else "the agent of a host"
    if address >= PART:
        return f"part {address - PART}"
    return f"worker {address}" if address >= 0 else f"server {-1 - address}"


class Message(msgspec.Struct, eq=False, gc=False):
    """A message from one node to another. `array` is read-only on arrival; `note` is of the class that the strategy
    declares for the message's tag.
    """

    source: Address
    tag: str
    array: Array | None = None
    note: Any = msgspec.field(default_factory=dict)
    step: int = 0
    """Number of local steps that the sender had completed when it sent the message."""
    number: int = 0
    """Number of the message among all messages from this sender to this receiver, from 1."""
    reply_to: int = 0
    """Number of the request that this message answers; 0 if the message answers no request."""

    @property
    def payload(self) -> Array:
        """The array of the message, for messages that must have an array.

        Raises:
            ProtocolError: the message has no array.
        """
        if self.array is None:
            raise ProtocolError(
                f"{node_name(self.source)} sent {self.tag!r} without an array, which messages with this tag need"
            )
        return self.array

    @property
    def payload_bytes(self) -> int:
        """Size of the array in bytes."""
        return 0 if self.array is None else self.array.nbytes


SCRIPT = "script."
"""Prefix of the names of the tasks that calls of a script, such as `sync()` and `consensus()`, start between two
steps.
"""


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """Pattern of the message that a program awaits; a field that is None matches any value."""

    tag: str | None = None
    source: Address | None = None
    reply_to: int | None = None
    place: Array | None = None
    """Array into which the driver should receive the message's array."""

    @property
    def by_script(self) -> bool:
        """Whether a script waits for the end of an exchange that it has asked for, such as `consensus`."""
        return (self.reply_to or 0) < 0 and (self.tag or "").startswith(SCRIPT)

    def __str__(self) -> str:
        if self.reply_to is not None and self.reply_to < 0:  # a task of the node itself
            if self.by_script:
                return "the other ranks in a call that every rank must make, such as consensus(), sync() or finish()"
            return f"the other ranks in the background task {self.tag!r}"
        what = f"{self.tag!r}" if self.tag else ("a reply" if self.reply_to else "a message")
        return f"{what} from {node_name(self.source)}" if self.source is not None else f"{what} from any node"


ANYTHING = Wanted()


@dataclass(eq=False, slots=True)
class Mailbox:
    """The messages that have arrived at a node and that no program has requested yet.

    Messages are stored by tag, and replies by their request, so that the time to find a message does not depend on the
    number of messages.
    """

    queues: dict[str, deque[tuple[int, Message]]] = field(default_factory=dict)
    """Tag → waiting messages with this tag, each with the number of its arrival."""
    _replies: dict[tuple[Address | None, int], Message] = field(default_factory=dict)
    _arrivals: int = 0
    _heard: dict[Address, int] = field(default_factory=dict)
    missing: dict[Address, int] = field(default_factory=dict)
    """Sender → number of the first message of this sender that was lost."""

    def __len__(self) -> int:
        return sum(map(len, self.queues.values())) + len(self._replies)

    def put(self, message: Message) -> None:
        """Add a message that has arrived."""
        self.hear(message)
        if message.reply_to:
            self._replies[message.source, message.reply_to] = message
            return
        self._arrivals += 1
        queue = self.queues.get(message.tag)
        if queue is None:
            queue = self.queues[message.tag] = deque()
        queue.append((self._arrivals, message))

    def give_back(self, messages: Iterable[Message]) -> None:
        """Put messages that a program had taken back to the front of the mailbox, in their original order."""
        for message in reversed(list(messages)):
            self.queues.setdefault(message.tag, deque()).appendleft((0, message))

    def hear(self, message: Message) -> None:
        """Count a message that has arrived, without storing it."""
        source, number, heard = message.source, message.number, self._heard
        if number:
            if number > (due := heard.get(source, 0) + 1):
                self.missing.setdefault(source, due)
            heard[source] = number

    def received(self) -> Mapping[Address, int]:
        """Return a mapping from each node to the number of its messages that have arrived so far."""
        return self._heard

    def clear(self, but: str) -> None:
        """Drop all messages, except those of the channel `but`."""
        self.queues = {tag: queue for tag, queue in self.queues.items() if tag.endswith(but)}
        self._replies.clear()

    def require_all(self, source: Address) -> None:
        """Check that no message of the given node was lost, because a sum over several messages needs all of them.

        Raises:
            ProtocolError: the numbers of the node's messages have a gap.
        """
        if source in self.missing:
            raise ProtocolError(
                f"message {self.missing[source]} from {node_name(source)} was lost, and later messages cannot be used "
                "without it; start the run again"
            )

    def take(self, wanted: Wanted) -> Message | None:
        """Remove and return the first message, in order of arrival, that matches the pattern; None if no message
        matches.
        """
        if wanted.reply_to is not None:
            return self._replies.pop((wanted.source, wanted.reply_to), None)
        if wanted.tag is not None:
            queue = self.queues.get(wanted.tag)
            return _first(queue, wanted.source) if queue else None
        first: tuple[int, deque[tuple[int, Message]]] | None = None
        for queue in self.queues.values():
            for number, message in queue:
                if wanted.source is None or message.source == wanted.source:
                    first = (number, queue) if first is None or number < first[0] else first
                    break
        return None if first is None else _first(first[1], wanted.source)

    def take_all(self, wanted: Wanted) -> Iterator[Message]:
        """Remove and yield every message that has arrived and matches the pattern."""
        while (message := self.take(wanted)) is not None:
            yield message


def _first(queue: deque[tuple[int, Message]], source: Address | None) -> Message | None:
    """Remove and return the queue's first message of `source` (None: of any node); None if there is none."""
    if source is None or queue[0][1].source == source:
        return queue.popleft()[1]
    for index, (_, message) in enumerate(queue):
        if message.source == source:
            del queue[index]
            return message
    return None


def frozen(array: Any) -> Array:
    """Return a copy of `array` for a message; the copy cannot change.

    A copy of a numpy array is read-only; an array that cannot be changed is not copied.
    """
    if not isinstance(array, np.ndarray):
        return copied(array)
    flags = array.flags
    if not flags.writeable and flags.c_contiguous and unchangeable(array):
        return array
    copy = array.copy()
    copy.setflags(write=False)
    return copy


def unchangeable(array: Array | None) -> bool:
    """Return whether neither the array nor any array of which it is a view can be written."""
    while isinstance(array, np.ndarray):
        if array.flags.writeable:
            return False
        array = array.base
    return array is None
