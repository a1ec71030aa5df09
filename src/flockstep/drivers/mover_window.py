"""Windows: named arrays that every rank can read, write and add to without the owner's doing anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.drivers.mover_calls import Calls
from flockstep.drivers.mover_collectives import fence
from flockstep.drivers.mover_node import Party
from flockstep.drivers.mover_packets import add_unpacked, codec_of, packed, plain, unpacked, whole
from flockstep.errors import ConfigurationError, FlockstepError, ProtocolError
from flockstep.messages import Array, Fields, Message, node_name

PUT, ADD, GET, FAILED = "window put/", "window add/", "window get/", "window failed/"
"""Tags, which end where no channel is."""


class Window:
    """A named array of the same shape and dtype on every rank; `put`, `get` and `accumulate` reach any of them.

    The owner's mover does what others ask, one call after the other, whatever the owner's own threads are doing.
    """

    def __init__(self, mover: Calls, name: str, array: Array):
        """For `Mover.window`, which has checked the array."""
        self.name = name
        self.array = array
        self._mover = mover
        self._flat = array.reshape(-1)
        self._lock = Lock()
        self._holder = 0
        self._problem: FlockstepError | None = None

    def put(self, rank: int, array: Any, offset: int = 0, codec: str | Codec | None = None) -> None:
        """Write `array` into the window of `rank`, from element `offset` of the flat array on; done at the next fence.

        Raises:
            ConfigurationError: it does not fit.
            PeerLost: that rank is dead.
        """
        self._give(PUT, rank, array, offset, 1.0, codec)

    def accumulate(
        self, rank: int, array: Any, offset: int = 0, scale: float = 1.0, codec: str | Codec | None = None
    ) -> None:
        """Add `scale` × `array` to the window of `rank`, from element `offset` on; done at the next fence.

        No other call takes effect in the middle of it, so that what several ranks add is all in the sum.

        Raises:
            ConfigurationError: it does not fit.
            PeerLost: that rank is dead.
        """
        self._give(ADD, rank, array, offset, scale, codec)

    def get(
        self,
        rank: int,
        offset: int = 0,
        size: int | None = None,
        codec: str | Codec | None = None,
        timeout: float | None = None,
    ) -> Array:
        """A copy of `size` elements (None: all there are) of the window of `rank`; in its shape if that is all of it.

        Raises:
            PeerLost: that rank is dead.
            TimedOut: it has not answered within `timeout` seconds.
        """
        count = len(self._flat) - offset if size is None else size
        self._check(rank, offset, count)
        note: Fields = {"window": self.name, "offset": offset, "size": count, "codec": str(codec_of(codec) or "")}
        message = self._mover.asked(rank, GET, None, note, timeout, f"window {self.name!r} of worker {rank}")
        array = unpacked(message, self._mover.max_bytes)
        if array.shape != (count,) or array.dtype != self._flat.dtype:
            raise ProtocolError(
                f"{node_name(rank)} answered with {array.dtype} {array.shape} where {count} × {self._flat.dtype} of "
                f"window {self.name!r} were asked for"
            )
        return array.reshape(self.array.shape) if count == len(self._flat) else array

    def fence(self, timeout: float | None = None) -> None:
        """Wait for every rank to come here; what anyone has put or added before is then done everywhere.

        Raises:
            PeerLost: a rank is dead.
            TimedOut: not everyone has come within `timeout` seconds.
            ProtocolError: what this rank had put or added could not be used by its receiver.
        """
        self._mover.together(f"window {self.name}", f"fence of window {self.name!r}", fence, timeout)
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    @contextmanager
    def local(self) -> Iterator[Array]:
        """This rank's own array, while no call of others takes effect on it: for changes that must not be interrupted.

        The mover waits meanwhile: be brief, and do not call it inside.
        """
        with self._lock:
            self._holder = get_ident()
            try:
                yield self.array
            finally:
                self._holder = 0

    def close(self, timeout: float | None = None) -> None:
        """Fence, then give the name back; the array stays as it is."""
        self.fence(timeout)
        self._mover.forget(self)

    def held_here(self) -> bool:
        """Whether the calling thread is inside `local`."""
        return self._holder == get_ident()

    def hear(self, message: Message, me: Party) -> None:
        """Do what another rank asks; on the mover's thread."""
        try:
            if message.tag == FAILED:
                self._problem = ProtocolError(str(message.note.get("reason")))
            elif message.tag == GET:
                self._answer(message, me)
            else:
                self._apply(message)
        except FlockstepError as error:
            note = {"window": self.name, "reason": f"{node_name(me.rank)} could not do {message.tag[:-1]!r}: {error}"}
            if message.tag == GET:
                me.reply(message, None, {"error": note["reason"]})
            elif message.tag != FAILED:
                me.send(message.source, FAILED, None, note)

    def _answer(self, message: Message, me: Party) -> None:
        part = self._part(message, whole(message, "size"))
        codec = codec_of(str(message.note["codec"])) if message.note.get("codec") else None
        with self._lock:
            packet = plain(part) if codec is None else packed(part, codec, me.step, lambda: me.random)
        me.reply(message, packet.data, packet.note)

    def _apply(self, message: Message) -> None:
        if message.tag == PUT:
            array = unpacked(message, self._mover.max_bytes).reshape(-1)
            if array.dtype != self._flat.dtype:
                raise ProtocolError(
                    f"{node_name(message.source)} put {array.dtype} into a window of {self._flat.dtype}"
                )
            part = self._part(message, len(array))
            with self._lock:
                part[:] = array
            return
        part, scale = self._part(message, whole(message, "size")), message.note.get("scale")
        if not isinstance(scale, float):
            raise ProtocolError(f"{node_name(message.source)} sent the scale {scale!r}; it is a number")
        with self._lock:
            add_unpacked(message, part, scale, self._mover.max_bytes)

    def _part(self, message: Message, size: int) -> Array:
        offset = whole(message, "offset")
        if offset < 0 or size < 0 or offset + size > len(self._flat):
            raise ProtocolError(
                f"{node_name(message.source)} asked for {size} elements from {offset} on, of {len(self._flat)}"
            )
        part: Array = self._flat[offset : offset + size]
        return part

    def _give(self, tag: str, rank: int, array: Any, offset: int, scale: float, codec: str | Codec | None) -> None:
        given = np.asarray(array).astype(self._flat.dtype, copy=False).reshape(-1)
        self._check(rank, offset, given.size)
        if given.size == 0:
            return
        packet = self._mover.packet(given, codec, f"window {self.name}")
        note = {"window": self.name, "offset": offset, "size": given.size, "scale": float(scale), **packet.note}
        self._mover.post(rank, tag, packet.data, note, closing=True)

    def _check(self, rank: int, offset: int, size: int) -> None:
        self._mover.check_rank(rank)
        if offset < 0 or size < 0 or offset + size > len(self._flat):
            raise ConfigurationError(
                f"window {self.name!r} has {len(self._flat)} elements, got {size} from element {offset} on; stay inside"
            )
