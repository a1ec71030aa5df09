"""Records on a tape what enters a node's program, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt

from flockstep.arrays.namespace import is_tensor, to_host
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.base import Collective
from flockstep.errors import CompositionError
from flockstep.expression import Component, fields_of
from flockstep.messages import LAUNCHER, Message
from flockstep.nodes import Node
from flockstep.records.tape import LAST_TICK, TapeWriter, note_as_json
from flockstep.runtime.tracker import FINAL
from flockstep.strategies.base import Strategy

BLOCKS = 16
"""Number of blocks of a gradient, or of parameters, with a checksum each."""
UNHEARD = frozenset({"taken", "count"})
"""Instructions of the supervisor that change no program: acknowledgements, and questions about a checkpoint."""


class Tape(Protocol):
    """What a node's runner tells the tape, which is recorded or followed."""

    def begin(self, node: Node, take: Callable[[Message], None]) -> None:
        """Set the node, and the function that delivers a message to it."""

    def heard(self, message: Message) -> None:
        """Note a message that is about to enter, in a run that is recorded."""

    def turn(self) -> None:
        """Count a request of the program, at whose end the messages so far have entered."""

    def reading(self, clock: Callable[[], float]) -> float:
        """Return the time that the program reads."""

    def gradient(self, loss: float | None, gradient: FlatArray) -> None:
        """Note a gradient that the program is about to use."""

    def snapshot(self, tick: float, step: int, params: FlatArray) -> None:
        """Note the parameters of an evaluation."""

    def flush(self) -> None:
        """Let what was noted survive this process."""

    def close(self) -> None:
        """End the tape, because the program has ended."""


class RecordingTape(Tape):
    """Writes what enters a program."""

    def __init__(self, writer: TapeWriter):
        self._writer = writer
        self._place = 0

    def begin(self, node: Node, take: Callable[[Message], None]) -> None:
        """Do nothing, because messages enter as they arrive."""

    def turn(self) -> None:
        self._place += 1

    def heard(self, message: Message) -> None:
        if message.source != LAUNCHER:
            self._writer.heard(self._place, message.source, message.number)
        elif message.tag not in UNHEARD and not (isinstance(message.note, dict) and message.note.get("do") in UNHEARD):
            self._writer.said(self._place, message.tag, note_as_json(message.note))

    def reading(self, clock: Callable[[], float]) -> float:
        self._writer.reading(self._place, seconds := clock())
        return seconds

    def gradient(self, loss: float | None, gradient: FlatArray) -> None:
        self._writer.gradient(self._place, loss, checksums(gradient).tobytes())

    def snapshot(self, tick: float, step: int, params: FlatArray) -> None:
        self._writer.snapshot(self._place, tick_number(tick), step, checksums(to_host(params)).tobytes())

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def require_replayable(strategy: Strategy) -> None:
    """Raise `CompositionError` if runs of a strategy cannot be replayed, because something enters its programs that is
    not a message.
    """
    why = ""
    if not strategy.traits.restarts:
        why = "its workers write to shared memory in an order that nobody sees"
    elif strategy.replicas:
        why = "its servers have backups, whose order the processes settle among themselves"
    elif not all(one.over_messages for one in _collectives(strategy)):
        why = "another library moves its sums"
    if why:
        raise CompositionError(f"a run with {strategy} cannot be replayed, because {why}; leave out --replayable")


def _collectives(component: Component) -> Iterator[Collective]:
    for name in fields_of(type(component)):
        inner = getattr(component, name)
        if isinstance(inner, Collective):
            yield inner
        elif isinstance(inner, Component):
            yield from _collectives(inner)


def tick_number(tick: float) -> int:
    """Return the number of an evaluation on the tape."""
    return LAST_TICK if tick == FINAL else int(tick)


def checksums(array: FlatArray) -> npt.NDArray[np.uint32]:
    """Return the checksums of the blocks of an array, uint32 (blocks,): sums of its 8-byte words, each times an odd
    number of its own, so that words that change places show too. Arrays on another device have none, because nothing is
    copied for a tape.
    """
    if is_tensor(array) and str(array.device) != "cpu":
        return np.empty(0, np.uint32)
    data = np.ascontiguousarray(np.asarray(array)).view(np.uint8)
    size = block_bytes(len(data))
    whole = len(data) // size * size
    last = np.zeros(size if whole < len(data) else 0, np.uint8)
    last[: len(data) - whole] = data[whole:]
    weights = _weights(size // 8)
    sums: npt.NDArray[np.uint64] = np.concatenate(
        [np.einsum("ij,j->i", part.view(np.uint64).reshape(-1, size // 8), weights) for part in (data[:whole], last)]
    )
    return (sums ^ (sums >> np.uint64(32))).astype(np.uint32)


@lru_cache(maxsize=4)
def _weights(count: int) -> npt.NDArray[np.uint64]:
    return np.arange(1, 2 * count, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def block_bytes(nbytes: int) -> int:
    """Return the number of bytes of a block with a checksum, of an array of `nbytes` bytes."""
    return max(8, -(-nbytes // BLOCKS // 8) * 8)
