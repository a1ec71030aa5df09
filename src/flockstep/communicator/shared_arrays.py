"""Arrays in memory that all ranks on a host share: sums in place, and windows without messages."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import numpy as np

from flockstep.codecs.base import Codec
from flockstep.communicator.calls import Calls
from flockstep.communicator.encoded import What, at_hand, codec_of
from flockstep.communicator.window import Window
from flockstep.errors import CompositionError, ConfigurationError, PeerLost, TimedOut, require
from flockstep.links.shared_group import SUMMED, SharedGroup
from flockstep.links.shared_memory import SharedMemory
from flockstep.messages import Array


class SharedArray:
    """One array for each rank, all in one shared segment; `local` is the array of this rank."""

    def __init__(self, memory: SharedMemory, calls: Calls, shape: Sequence[int], dtype: str):
        """Place the arrays in a segment with room for an array of each rank.

        Raises:
            ProtocolError: the segment has another size.
        """
        size = math.prod(shape)
        self.group = SharedGroup(memory, calls.rank, calls.workers, size * np.dtype(dtype).itemsize)
        self.flat = self.group.allocate(size, dtype)
        self.local: Array = self.flat.reshape(shape)
        self.lock = Lock()
        """Lock held by the thread of this process that accesses any rank's array, or keeps other threads out of its
        own.
        """
        self._calls = calls
        self._gone: set[int] = set()
        self._turn = Lock()
        self._given_up = ""

    def all_reduce(self, divisor: int, timeout: float | None) -> None:
        """Replace every rank's array with the sum divided by `divisor`.

        Raises:
            PeerLost: a rank has left or died.
            ProtocolError: the ranks do not call the same operation.
            TimedOut: the other ranks did not call within `timeout` seconds, in this all-reduce or an earlier one.
        """
        until = None if timeout is None else time.monotonic() + timeout

        def look() -> None:
            self._look()
            if until is not None and time.monotonic() >= until:
                raise TimedOut(
                    f"worker {self._calls.rank} waited {timeout:g} s for the other workers in an all-reduce; other "
                    "workers may be late or stopped"
                )

        with self._turn:
            if self._given_up:
                raise TimedOut(
                    f"an earlier all-reduce on this shared array failed ({self._given_up}), so the ranks may no longer "
                    "be at the same call; create a new shared array on all ranks"
                )
            self._gone = set()
            try:
                self.group.all_reduce(self.flat, look, divisor)
            except BaseException as error:  # after any error, the other ranks may be half way through
                self._given_up = str(error) or type(error).__name__
                raise
        self._calls.book(*self.group.moved(self.flat))

    def _look(self) -> None:
        """Check that all ranks are still present; a rank that has just left may have taken part in this sum.

        Raises:
            PeerLost: a rank was gone at the previous check already.
        """
        self._calls.require_open()
        node = self._calls.node
        gone = {rank for rank in range(node.workers) if node.gone(rank)}
        for rank in sorted(gone & self._gone):
            raise PeerLost(f"{node.end_of(rank)}; worker {self._calls.rank} waited for that worker in an all-reduce")
        self._gone = gone


def array_bytes(shape: Sequence[int], dtype: str) -> int:
    """Return the number of bytes of one rank's array in a shared segment.

    Raises:
        ConfigurationError: an array of that shape and dtype cannot be shared.
    """
    require(dtype in SUMMED, "the dtype of a shared array", f"one of {', '.join(SUMMED)}", dtype, "convert it")
    if min(shape, default=0) < 0:
        raise ConfigurationError(
            f"the axes of a shared array must be >= 0, got shape {tuple(shape)}; use 0 for an empty array"
        )
    return math.prod(shape) * np.dtype(dtype).itemsize


def attached(address: str, size: int) -> SharedMemory:
    """Attach to the memory segment of `size` bytes that rank 0 has created, and return it.

    Raises:
        CompositionError: this rank is on another host.
    """
    try:
        return SharedMemory.attach(address, size)
    except CompositionError as error:
        raise CompositionError(f"{error}; use ordinary arrays, which are sent in messages") from None


class SharedWindow(Window):
    """A window on a shared array: the caller accesses the owner's memory directly, and an operation is complete when
    the call returns.
    """

    def __init__(self, calls: Calls, name: str, shared: SharedArray):
        """Create the window; called by `Communicator.window`."""
        super().__init__(calls, name, shared.local)
        self._lock = shared.lock  # the segment's locks are between processes, not between threads of one
        self._shared = shared

    def _give(self, what: What, rank: int, array: Any, offset: int, scale: float, codec: str | Codec | None) -> None:
        self._calls.require_open()
        given = self._given(rank, array, offset)
        if codec is not None:
            given = self._through(codec, given)
        with self._alone(rank):
            part = self._shared.group.at(rank, self._flat)[offset : offset + given.size]
            if what == "put":
                part[:] = given
            else:
                np.add(part, given if scale == 1 else given * given.dtype.type(scale), out=part)

    def _read(self, rank: int, offset: int, count: int, codec: str | Codec | None, timeout: float | None) -> Array:
        self._calls.require_open()
        with self._alone(rank):
            array: Array = self._shared.group.at(rank, self._flat)[offset : offset + count].copy()
        return array if codec is None else self._through(codec, array)

    @contextmanager
    def _alone(self, rank: int) -> Iterator[None]:
        node = self._calls.node
        if rank in node.departed:
            raise PeerLost(f"{node.end_of(rank)}; worker {node.rank} needs the window of that worker")
        with self._lock, self._shared.group.alone_on(rank):
            yield

    def _through(self, codec: str | Codec, array: Array) -> Array:
        """Return `array` encoded and decoded, as a receiver would get it."""
        chosen = codec_of(codec)
        assert chosen is not None
        packet = self._calls.packet(array, chosen, f"window {self.name}")
        fit = at_hand(chosen, array, packet.note.at)
        return fit.decode(packet.data, array.size, array.dtype.name)
