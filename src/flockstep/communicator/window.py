"""Windows: named arrays that every rank can read, write and add to without the owner's involvement (one-sided
communication).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock, get_ident
from typing import Any

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.communicator.calls import Calls
from flockstep.communicator.collectives import fence
from flockstep.communicator.encoded import (
    UNDONE,
    WINDOW,
    Failed,
    Reply,
    What,
    WindowOperation,
    add_unpacked,
    codec_of,
    packed,
    unpacked,
)
from flockstep.communicator.rank import Rank
from flockstep.errors import ConfigurationError, FlockstepError, ProtocolError
from flockstep.messages import Array, Message, Wanted, node_name


class Window:
    """A named array of the same shape and dtype on every rank; `put`, `get` and `accumulate` access the array of any
    rank.

    The owner's communicator executes the operations of other ranks one after another, whatever the owner's threads do.
    """

    def __init__(self, calls: Calls, name: str, array: Array):
        """Create the window; called by `Communicator.window`, which has checked the array."""
        self.name, self.tag, self._undone = name, f"{WINDOW}{name}/", f"{UNDONE}{name}/"
        self.array = array
        self._calls = calls
        self._flat = array.reshape(-1)
        self._lock = Lock()
        self._holder = 0

    def put(self, rank: int, array: Any, offset: int = 0, codec: str | Codec | None = None) -> None:
        """Write `array` into the window of `rank`; the write is complete at the next fence.

        Args:
            rank: the window's owner.
            array: the values, converted to the window's dtype and flattened.
            offset: first element of the owner's flat array to write to.
            codec: the codec to encode the values with, or None.

        Raises:
            ConfigurationError: the array does not fit.
            PeerLost: the rank has died.
        """
        self._give("put", rank, array, offset, 1.0, codec)

    def accumulate(
        self, rank: int, array: Any, offset: int = 0, scale: float = 1.0, codec: str | Codec | None = None
    ) -> None:
        """Add `scale` × `array` to the window of `rank`; the addition is complete at the next fence.

        The operation is atomic with respect to other calls, so that the sum contains what every rank adds.

        Args:
            rank: the window's owner.
            array: the values, converted to the window's dtype and flattened.
            offset: first element of the owner's flat array to add to.
            scale: factor of the values.
            codec: the codec to encode the values with, or None.

        Raises:
            ConfigurationError: the array does not fit.
            PeerLost: the rank has died.
        """
        self._give("add", rank, array, offset, scale, codec)

    def get(
        self,
        rank: int,
        offset: int = 0,
        size: int | None = None,
        codec: str | Codec | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Return a copy of elements of the window of `rank`.

        Args:
            rank: the window's owner.
            offset: first element of the owner's flat array to read.
            size: number of elements; None for all from `offset` on.
            codec: the codec to encode the answer with, or None.
            timeout: seconds to wait for the answer; None for no limit.

        Returns:
            A copy of the whole window in the window's shape, or of a part of it as a flat array.

        Raises:
            PeerLost: the rank has died.
            TimedOut: the rank did not answer within `timeout` seconds.
        """
        count = len(self._flat) - offset if size is None else size
        self._check(rank, offset, count)
        array = self._read(rank, offset, count, codec, timeout)
        return array.reshape(self.array.shape) if count == len(self._flat) else array

    def _read(self, rank: int, offset: int, count: int, codec: str | Codec | None, timeout: float | None) -> Array:
        """Return a copy of `count` elements of the window of `rank`, as a flat array."""
        note = WindowOperation(codec=str(codec_of(codec) or ""), what="get", offset=offset, size=count)
        message = self._calls.asked(rank, self.tag, None, note, timeout, f"window {self.name!r} of worker {rank}")
        array = unpacked(message, self._calls.max_bytes)
        if array.shape != (count,) or array.dtype != self._flat.dtype:
            raise ProtocolError(
                f"{node_name(rank)} answered with {array.dtype} of shape {array.shape}, but {count} elements of "
                f"{self._flat.dtype} of window {self.name!r} were requested"
            )
        return array

    def fence(self, timeout: float | None = None) -> None:
        """Wait until every rank has called `fence`; all puts and additions made before are then done on every rank.

        Raises:
            PeerLost: a rank has died.
            TimedOut: not every rank called within `timeout` seconds.
            ProtocolError: a receiver could not use what this rank had put or added.
        """

        async def program(me: Rank) -> list[Message]:
            await fence(me)
            return list(me.mailbox.take_all(Wanted(self._undone)))

        undone = self._calls.run_collective(f"window {self.name}", f"fence of window {self.name!r}", program, timeout)
        if undone:
            raise ProtocolError(undone[-1].note.why)

    @contextmanager
    def local(self) -> Iterator[Array]:
        """Yield this rank's own array for atomic changes: no operation of another rank takes effect during the block.

        The communicator waits as long as the block runs: keep the block short, and do not call the communicator in it.
        """
        with self._alone(self._calls.rank):
            self._holder = get_ident()
            try:
                yield self.array
            finally:
                self._holder = 0

    def _alone(self, rank: int) -> AbstractContextManager[object]:
        """Return the context manager that keeps other threads and ranks out of the array of `rank`."""
        return self._lock

    def close(self, timeout: float | None = None) -> None:
        """Wait for a fence, then free the name of the window; the array does not change."""
        self.fence(timeout)
        self._calls.forget(self.tag)

    def held_here(self) -> bool:
        """Whether the calling thread is inside a `with window.local()` block."""
        return self._holder == get_ident()

    def hear(self, message: Message, me: Rank) -> None:
        """Carry out an operation of another rank on this rank's array; runs on the engine's thread."""
        note, most = message.note, self._calls.max_bytes
        try:
            part = self._part(message)
            if note.what == "get":
                with self._lock:
                    packet = packed(part, codec_of(note.codec or None), me.step, lambda: me.random)
                me.reply(message, packet.data, packet.note.within(Reply))
            elif note.what == "add":
                with self._lock:
                    add_unpacked(message, part, note.scale, most)
            else:
                array = unpacked(message, most).reshape(-1)
                if array.dtype != part.dtype or array.size != part.size:
                    raise ProtocolError(
                        f"{node_name(message.source)} put {array.size} × {array.dtype} into {part.size} × {part.dtype}"
                    )
                with self._lock:
                    part[:] = array
        except FlockstepError as error:
            why = f"{node_name(me.rank)} failed in the window operation {note.what!r}: {error}"
            if note.what == "get":
                me.reply(message, None, Reply(error=why))
            else:
                me.send(message.source, self._undone, None, Failed(type(error).__name__, why))

    def _part(self, message: Message) -> Array:
        offset, size = message.note.offset, message.note.size
        if offset + size > len(self._flat):
            raise ProtocolError(
                f"{node_name(message.source)} requested {size} elements from offset {offset}, but the window has "
                f"{len(self._flat)}"
            )
        part: Array = self._flat[offset : offset + size]
        return part

    def _give(self, what: What, rank: int, array: Any, offset: int, scale: float, codec: str | Codec | None) -> None:
        given = self._given(rank, array, offset)
        if given.size == 0:
            return
        packet = self._calls.packet(given, codec, f"window {self.name}")
        note = packet.note.within(WindowOperation, what=what, offset=offset, size=given.size, scale=float(scale))
        self._calls.post(rank, self.tag, packet.data, note, closing=True)

    def _given(self, rank: int, array: Any, offset: int) -> Array:
        """Return a caller's array, flat and in the window's dtype."""
        given: Array = np.asarray(array).astype(self._flat.dtype, copy=False).reshape(-1)
        self._check(rank, offset, given.size)
        return given

    def _check(self, rank: int, offset: int, size: int) -> None:
        self._calls.check_rank(rank)
        if offset < 0 or size < 0 or offset + size > len(self._flat):
            raise ConfigurationError(
                f"window {self.name!r} has {len(self._flat)} elements, got a range of {size} from element {offset}; "
                "choose a range inside the window"
            )
