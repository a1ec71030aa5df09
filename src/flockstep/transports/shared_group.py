"""Workers of one host that share memory: all-reduce without messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray, slices
from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.transports.shared_memory import SharedMemory

PAGE = 4096
SLOT = 1 << 17
"""Bytes of each of a process's two slots, through which arrays from elsewhere are added up."""
PIECE = 1 << 20
"""Bytes of a message of a ring all-reduce, at most."""
MISMATCH = -2
SUMMED = ("float32", "float64")
"""Names of the dtypes that can be added up here."""


class SharedGroup:
    """One process's view of a segment that n processes of a host have mapped.

    Each process has a region: two slots, then the arrays that it allocates. All processes allocate the same arrays in
    the same order, so that they lie at the same place of every region, and call `all_reduce` in the same order.
    """

    def __init__(self, memory: SharedMemory, rank: int, workers: int, room: int):
        """`room` is the number of bytes that each process may allocate; the segment must hold `needed` bytes.

        Raises:
            ProtocolError: it is smaller.
        """
        from flockstep.transports import shared_signals, shared_sums

        self.rank, self.workers = rank, workers
        self.waited = 0.0
        """Seconds that the last all-reduce waited for the others."""
        if memory.size < needed(workers, room):
            raise ProtocolError(f"a segment of {memory.size} bytes is none of {workers} workers with {room} bytes each")
        self._memory = memory
        self._control = needed(workers, 0) - workers * 2 * SLOT
        self._stride = 2 * SLOT + _rounded(room)
        self._counters = memory.array(np.int32, self._control // 4)
        self._turn = 0
        self._used = 2 * SLOT
        self._home = memory.array(np.uint8, 1, self._control + rank * self._stride).ctypes.data
        self._how = shared_signals.manner(workers)
        self._sum_in_place, self._sum_through_slots = shared_sums.in_place, shared_sums.through_slots
        self._bounds: dict[int, Any] = {}
        self._heaps = {np.dtype(name).char: self._heap(name) for name in SUMMED}

    def allocate(self, size: int, dtype: str) -> FlatArray:
        """A new array (size,) in this process's region, zeros: what lies in it is added up where it is.

        Raises:
            ConfigurationError: the region is full.
        """
        nbytes = _rounded(size * np.dtype(dtype).itemsize)
        if self._used + nbytes > self._stride:
            raise ConfigurationError(f"a region of {self._stride} bytes has no room for {nbytes} more; make it larger")
        start = self._control + self.rank * self._stride + self._used
        self._used += nbytes
        return self._memory.array(dtype, size, start)

    def at(self, rank: int, array: FlatArray) -> FlatArray:
        """What lies in the region of `rank` where `array`, which was allocated here, lies in this one."""
        offset = self._offset(array)
        assert offset is not None, "an array from elsewhere"
        return self._memory.array(array.dtype, array.size, self._control + rank * self._stride + offset)

    def alone_on(self, rank: int) -> AbstractContextManager[None]:
        """Keep all other processes out of their own `alone_on` of that rank meanwhile."""
        return self._memory.lock_byte(rank)

    def holds(self, array: FlatArray) -> bool:
        """Whether `array` lies in this process's region."""
        return self._offset(array) is not None

    def can(self, array: FlatArray) -> bool:
        """Whether `array` can be added up here: contiguous float32 or float64."""
        return array.dtype.char in "fd" and array.dtype.isnative and array.ndim == 1 and array.flags.c_contiguous

    def all_reduce(self, array: FlatArray, meanwhile: Callable[[], None], divisor: int = 1) -> None:
        """Replace `array` by the sum over all processes, divided by `divisor`; in place where it lies in the region.

        Bit for bit the sum of a ring all-reduce. `meanwhile` is called now and then while others keep this one waiting,
        and may raise.

        Raises:
            ProtocolError: another process adds up an array of another size or dtype, or one that lies elsewhere, or
                divides by another number.
        """
        if self.workers == 1:
            array /= divisor
            return
        self._how[4] = 0
        offset = self._offset(array) if array.nbytes > PAGE else None
        if offset is not None:
            self._in_place(array, offset, meanwhile, divisor)
        else:
            self._through_slots(array, meanwhile, divisor)
        self.waited = int(self._how[4]) * 1e-9

    def moved(self, array: FlatArray) -> tuple[int, int, int]:
        """Bytes sent, bytes received and messages each way of a ring all-reduce, which such a sum stands for."""
        n, rank, size = self.workers, self.rank, len(array)
        sizes = [part.stop - part.start for part in slices(size, n)]
        sent = 2 * size - sizes[(rank + 1) % n] - sizes[(rank + 2) % n]
        received = 2 * size - sizes[rank] - sizes[(rank + 1) % n]
        messages = 2 * (n - 1) * ring_pieces(sizes[0] * array.itemsize)
        return (sent * array.itemsize, received * array.itemsize, messages) if n > 1 else (0, 0, 0)

    def _in_place(self, array: FlatArray, offset: int, meanwhile: Callable[[], None], divisor: int) -> None:
        heap, stride, start = self._heaps[array.dtype.char], self._stride // array.itemsize, offset // array.itemsize
        bounds, by, stage = self._limits(len(array)), array.dtype.type(divisor), 0
        while stage := self._sum_in_place(
            heap, stride, start, bounds, self._counters, self.rank, self._turn, stage, by, self._how
        ):
            self._pause(stage, meanwhile)
        self._turn += 2

    def _through_slots(self, array: FlatArray, meanwhile: Callable[[], None], divisor: int) -> None:
        heap, stride, room = self._heaps[array.dtype.char], self._stride // array.itemsize, SLOT // array.itemsize
        bounds, by, at, stage = self._limits(len(array)), array.dtype.type(divisor), 0, 0
        while at >= 0:
            then = self._sum_through_slots(
                heap, stride, room, array, bounds, self._counters, self.rank, self._turn, at, stage, by, self._how
            )
            done = len(array) if then == -1 else max(at, then)
            self._turn += -(-done // room) - -(-at // room)
            at, stage = then, 1
            if at != -1:
                self._pause(at, meanwhile)

    def _pause(self, answer: int, meanwhile: Callable[[], None]) -> None:
        if answer == MISMATCH:
            raise ProtocolError(
                f"worker {self.rank} adds up another array than others at the same time; call the collectives in the "
                "same order, with arrays of the same size and dtype, on every worker"
            )
        meanwhile()

    def _offset(self, array: FlatArray) -> int | None:
        """Bytes from the start of the region to `array`; None where it lies elsewhere."""
        offset = int(array.__array_interface__["data"][0]) - self._home
        return offset if offset >= 2 * SLOT and offset + array.nbytes <= self._stride else None

    def _limits(self, size: int) -> Any:
        if size not in self._bounds:
            parts = slices(size, self.workers)
            self._bounds[size] = np.array([part.start for part in parts] + [size], np.int64)
        return self._bounds[size]

    def _heap(self, dtype: str) -> FlatArray:
        itemsize = np.dtype(dtype).itemsize
        return self._memory.array(dtype, self.workers * self._stride // itemsize, self._control)


def ring_pieces(chunk: int) -> int:
    """Messages in which a chunk of that many bytes travels around a ring.

    Several of them fit the processor's caches, on the way from one worker's sum to the next one's.
    """
    return max(1, -(-chunk // PIECE))


def warm_up() -> None:
    """Have everything compiled, or read back from where numba keeps it, so that no sum has to wait for that."""
    from flockstep.transports import shared_signals
    from flockstep.transports.shared_sums import in_place, through_slots

    counters, how, bounds = np.zeros(64, np.int32), shared_signals.manner(1), np.array([0, 1], np.int64)
    for name in SUMMED:
        heap, one = np.zeros(8, name), np.dtype(name).type(1)
        in_place(heap, 8, 0, bounds, counters, 0, 0, 0, one, how)
        through_slots(heap, 8, 1, np.zeros(1, name), bounds, counters, 0, 2, 0, 0, one, how)


def room_for(model_bytes: int) -> int:
    """Bytes that each process of a run may allocate: the model a few times over; what is not used takes no memory."""
    return 4 * model_bytes + (1 << 20)


def needed(workers: int, room: int) -> int:
    """Bytes of the segment of a group."""
    return _rounded(workers * 128) + workers * (2 * SLOT + _rounded(room))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
