"""All-reduce without messages, for workers on one host that share memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np

from flockstep.arrays.schema import FlatArray, slices
from flockstep.errors import ConfigurationError, ProtocolError
from flockstep.links.shared_memory import SharedMemory

SLOTS = 3
"""Number of slots that each process has for summing arrays outside of the segment, as in `shared_sums`."""
PAGE = 4096
SLOT = 1 << 19
"""Size in bytes of each slot that a process has for summing arrays outside of the segment."""
SMALL = 1 << 15
"""Size in bytes of an array outside of the segment up to which every process sums the whole array."""
PIECE = 1 << 20
"""Largest message of a ring all-reduce, in bytes."""
RETURNED = 4 << 20
"""Number of bytes of an array that are moved out of the segment at a time; then their memory is returned to the
system.
"""
MISMATCH = -2
SUMMED = ("float32", "float64")
"""Names of the dtypes that can be summed in shared memory."""


class SharedGroup:
    """One process's view of a segment that n processes on a host have mapped.

    Each process has a region: three slots, then the arrays that it allocates. All processes allocate the same arrays in
    the same order, so that an array lies at the same offset in every region, and call `all_reduce` in the same order.
    """

    def __init__(self, memory: SharedMemory, rank: int, workers: int, room: int):
        """Attach to the segment `memory`; `room`: bytes that each process may allocate.

        Raises:
            ProtocolError: the segment has fewer than `needed(workers, room)` bytes.
        """
        from flockstep.links import shared_signals, shared_sums

        self.rank, self.workers = rank, workers
        self.waited = 0.0
        """Seconds that the last all-reduce waited for other processes."""
        if memory.size < needed(workers, room):
            raise ProtocolError(
                f"a segment of {memory.size} bytes is too small for {workers} workers with {room} bytes each"
            )
        self._memory = memory
        self._control = needed(workers, 0) - workers * SLOTS * SLOT
        self._stride = SLOTS * SLOT + _rounded(room)
        self._counters = memory.array(np.int32, self._control // 4)
        self._turn = 0
        self._used = SLOTS * SLOT
        self._home = memory.array(np.uint8, 1, self._control + rank * self._stride).ctypes.data
        self._how = shared_signals.manner(workers)
        self._sums = shared_sums
        self._bounds: dict[tuple[int, int], Any] = {}
        self._members = {np.dtype(name).char: self._members_of(np.dtype(name)) for name in SUMMED}

    def allocate(self, size: int, dtype: str) -> FlatArray:
        """Allocate an array (size,) of zeros in this process's region; such an array is summed without a copy.

        Raises:
            ConfigurationError: the region is full.
        """
        nbytes = _rounded(size * np.dtype(dtype).itemsize)
        if self._used + nbytes > self._stride:
            raise ConfigurationError(
                f"a region of {self._stride} bytes has no room for {nbytes} more bytes; make the region larger"
            )
        start = self._control + self.rank * self._stride + self._used
        self._used += nbytes
        return self._memory.array(dtype, size, start)

    def taken(self, array: FlatArray) -> FlatArray:
        """Move an array that no process uses any more out of the region, piece by piece, so that two whole copies never
        exist.

        Afterwards, the memory in the region holds zeros.
        """
        own, step, offset = np.empty_like(array), RETURNED // array.itemsize, self.offset(array)
        assert offset is not None, "the array was not allocated in this group"
        start = self._control + self.rank * self._stride + offset
        for low in range(0, len(array), step):
            own[low : low + step] = array[low : low + step]
            self._memory.discard(start + low * array.itemsize, _rounded(own[low : low + step].nbytes))
        return own

    def at(self, rank: int, array: FlatArray) -> FlatArray:
        """Return the array in the region of process `rank` at the same offset as `array`, which this process has
        allocated.
        """
        offset = self.offset(array)
        assert offset is not None, "the array was not allocated in this group"
        return self._memory.array(array.dtype, array.size, self._control + rank * self._stride + offset)

    def alone_on(self, rank: int) -> AbstractContextManager[None]:
        """Context manager that holds the lock for the region of `rank`; only one process at a time can hold the
        lock.
        """
        return self._memory.lock_byte(rank)

    def offset(self, array: FlatArray) -> int | None:
        """Return the offset of `array` from the start of the region in bytes; None if `array` is not in the region."""
        offset = int(array.__array_interface__["data"][0]) - self._home
        return offset if offset >= SLOTS * SLOT and offset + array.nbytes <= self._stride else None

    def holds(self, array: FlatArray) -> bool:
        """Return whether `array` lies in this process's region."""
        return self.offset(array) is not None

    def can(self, array: FlatArray) -> bool:
        """Return whether `array` can be summed in shared memory: one dimension, contiguous, and of dtype float32 or
        float64.
        """
        return array.dtype.char in "fd" and array.dtype.isnative and array.ndim == 1 and array.flags.c_contiguous

    def all_reduce(self, array: FlatArray, meanwhile: Callable[[], None], divisor: int = 1) -> None:
        """Replace `array` with the sum over all processes, divided by `divisor`.

        No copy is made if `array` lies in the region.

        The result equals that of a ring all-reduce bit for bit. `meanwhile` is called from time to time while this
        process waits for others, and may raise.

        Raises:
            ProtocolError: another process passes an array of another size or dtype, an array at another offset, or
                another divisor.
        """
        if self.workers == 1:
            array /= divisor
            return
        self._how[4] = 0
        offset = self.offset(array) if array.nbytes > PAGE else None
        if offset is not None:
            self._staged(self._sums.in_place, array, self.workers, meanwhile, divisor)
            self._turn += 2
        else:
            members, room = self._members[array.dtype.char], SLOT // array.itemsize
            bounds, by, at = self._limits(len(array), self.workers), array.dtype.type(divisor), 0
            pieces = 0 if array.nbytes <= SMALL else -(-len(array) // room)
            while (at := self._sums.through_slots(members, room, array, pieces, bounds, self._turn, at, by)) != -1:
                self._pause(at, meanwhile)
            self._turn += pieces + 1
        self.waited = int(self._how[4]) * 1e-9

    def reduce_scatter(self, array: FlatArray, shares: int, meanwhile: Callable[[], None]) -> None:
        """Replace part i of `array` on process i with the sum over all processes; only the first `shares` processes
        have a part.

        The parts are `slices(len(array), shares)`; process i adds the arrays in the order i, i+1, …, i-1. `array` lies
        in the region. Each process may change its own part until it calls `all_gather`, with the same arguments.

        Raises:
            ProtocolError: another process calls with other arguments, as in `all_reduce`.
        """
        self._how[4] = 0
        self._staged(self._sums.sum_part, array, shares, meanwhile, 1)
        self.waited = int(self._how[4]) * 1e-9

    def all_gather(self, array: FlatArray, shares: int, meanwhile: Callable[[], None]) -> None:
        """Exchange the parts of all processes."""
        self._how[4] = 0
        self._staged(self._sums.share_part, array, shares, meanwhile, 1)
        self._turn += 2
        self.waited = int(self._how[4]) * 1e-9

    def mean_of_part(self, array: FlatArray, into: FlatArray, meanwhile: Callable[[], None]) -> None:
        """Write part `rank` of the mean over all processes to `into`, added in the order of processes.

        The parts are `slices(len(array), workers)`. `array` lies in the region and must not change before
        `exchange_parts`, which must follow.

        Raises:
            ProtocolError: another process calls with an array of another size or dtype, or at another offset.
        """
        self._how[4] = 0
        self._staged(self._sums.mean_part, array, self.workers, meanwhile, self.workers, into)
        self.waited = int(self._how[4]) * 1e-9

    def exchange_parts(self, part: FlatArray, into: FlatArray, meanwhile: Callable[[], None]) -> None:
        """Copy the `part` of every other process to its place in `into` (K,).

        `part` is as long as the longest part, lies in the region, and may change after the next `mean_of_part`.
        """
        self._how[4], stage = 0, 0
        while stage := self._sums.arrive(self._counters, self.rank, self.workers, self._turn + 2, stage, self._how):
            meanwhile()
        self._turn += 2
        for rank, place in enumerate(slices(len(into), self.workers)):
            if rank != self.rank:
                into[place] = self.at(rank, part)[: place.stop - place.start]
        self.waited = int(self._how[4]) * 1e-9

    def moved(self, array: FlatArray) -> tuple[int, int, int]:
        """Return the bytes sent, the bytes received and the messages in each direction that a ring all-reduce of
        `array` would cost.
        """
        return _moved_on_ring(self.workers, self.rank, len(array), array.itemsize)

    def moved_in_shares(self, array: FlatArray, shares: int) -> tuple[int, int]:
        """Return the bytes and the messages in each direction that `reduce_scatter` and `all_gather` would cost if each
        share were sent in a message.
        """
        sizes = [part.stop - part.start for part in slices(len(array), shares)]
        mine = [size for rank, size in enumerate(sizes) if rank == self.rank]
        elements = sum(sizes) - sum(mine) + (self.workers - 1) * sum(mine)
        return elements * array.itemsize, shares - len(mine) + (self.workers - 1) * len(mine)

    def _staged(
        self,
        kernel: Callable[..., int],
        array: FlatArray,
        shares: int,
        meanwhile: Callable[[], None],
        divisor: int,
        *more: FlatArray,
    ) -> None:
        """Call a kernel for `array`, which lies in the region, until it is done; `more`: further arguments."""
        offset = self.offset(array)
        assert offset is not None, "the array was not allocated in this group"
        members, start = self._members[array.dtype.char], offset // array.itemsize
        bounds, by, stage = self._limits(len(array), shares), array.dtype.type(divisor), 0
        while stage := kernel(members, start, bounds, self._turn, stage, by, *more):
            self._pause(stage, meanwhile)

    def _pause(self, answer: int, meanwhile: Callable[[], None]) -> None:
        if answer == MISMATCH:
            raise ProtocolError(
                f"worker {self.rank} adds up a different array than the other workers; call the collectives in the "
                "same order on every worker, with arrays of the same size and dtype"
            )
        meanwhile()

    def _limits(self, size: int, shares: int) -> Any:
        """The first element of each process's part, and the end of the last part."""
        if (size, shares) not in self._bounds:
            starts = [part.start for part in slices(size, shares)]
            self._bounds[size, shares] = np.array(starts + [size] * (self.workers + 1 - shares), np.int64)
        return self._bounds[size, shares]

    def _members_of(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        """The `members` of all sums of this dtype."""
        stride = self._stride // dtype.itemsize
        heap = self._memory.array(dtype, self.workers * stride, self._control)
        return heap, stride, self._counters, self.rank, self._how


def ring_pieces(chunk: int) -> int:
    """Return the number of messages that a ring all-reduce sends for a chunk of `chunk` bytes.

    A chunk is divided so that each message fits into the processor's caches between one worker's sum and the next.
    """
    return max(1, -(-chunk // PIECE))


@lru_cache(maxsize=256)
def _moved_on_ring(n: int, rank: int, size: int, itemsize: int) -> tuple[int, int, int]:
    sizes = [part.stop - part.start for part in slices(size, n)]
    sent = 2 * size - sizes[(rank + 1) % n] - sizes[(rank + 2) % n]
    received = 2 * size - sizes[rank] - sizes[(rank + 1) % n]
    messages = 2 * (n - 1) * ring_pieces(sizes[0] * itemsize)
    return (sent * itemsize, received * itemsize, messages) if n > 1 else (0, 0, 0)


def warm_up() -> None:
    """Compile the kernels for sums, or load them from numba's cache, so that no sum waits for compilation."""
    from flockstep.links import shared_signals
    from flockstep.links.shared_sums import arrive, in_place, mean_part, share_part, sum_part, through_slots

    counters, how, bounds = np.zeros(64, np.int32), shared_signals.manner(1), np.array([0, 1], np.int64)
    arrive(counters, 0, 1, 0, 0, how)
    for name in SUMMED:
        heap, one = np.zeros(8, name), np.dtype(name).type(1)
        members = heap, 8, counters, 0, how
        for kernel in (in_place, sum_part, share_part):
            kernel(members, 0, bounds, 0, 0, one)
        mean_part(members, 0, bounds, 0, 0, one, heap[:0])
        through_slots(members, 2, np.zeros(1, name), 0, bounds, 2, 0, one)


def room_for(model_bytes: int) -> int:
    """Return the number of bytes that each process of a run may allocate in the segment: four models and 1 MiB. Unused
    memory takes no physical memory.
    """
    return 4 * model_bytes + (1 << 20)


def needed(workers: int, room: int) -> int:
    """Return the size in bytes of the shared segment that a group of processes needs."""
    return _rounded(workers * 128) + workers * (SLOTS * SLOT + _rounded(room))


def _rounded(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
