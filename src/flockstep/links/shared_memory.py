"""Anonymous memory that processes on one host share; the memory has no name that could be left behind."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import re
import struct
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flockstep.errors import CompositionError, ConfigurationError

with contextlib.suppress(ImportError):  # elsewhere than on Linux there is no shared memory, see `create`
    import fcntl

_LOCK_OF_DESCRIPTION = 38
"""F_OFD_SETLKW: waits for a lock that belongs to the open file description, not to the process."""
_NAME = "flockstep"
_PLACE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_PROCESSES = Path("/proc/self/ns/pid")


class SharedMemory:
    """A segment of zeros without a file; it disappears with the last process that uses it, however that process ends.

    `address` is the text with which another process on this host attaches; it is valid as long as the creating process
    lives.
    """

    def __init__(self, address: str, descriptor: int):
        self.address = address
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """Create a segment of `size` bytes.

        Raises:
            ConfigurationError: this system has no shared memory, or too little.
        """
        if sys.platform != "linux":
            raise ConfigurationError(
                f"shared memory needs Linux, got {sys.platform}; choose a strategy that sends messages"
            )
        descriptor = os.memfd_create(_NAME)
        try:
            os.ftruncate(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise _too_much(size, error) from None
        try:
            return cls(f"{host_here()}:/proc/{os.getpid()}/fd/{descriptor}", descriptor)
        except OSError as error:
            raise _too_much(size, error) from None

    @classmethod
    def attach(cls, address: str, size: int = 0) -> SharedMemory:
        """Attach to a segment of at least `size` bytes that another process created.

        Raises:
            CompositionError: the segment lies on another host, its process has ended, or it is not a segment of
                flockstep.
        """
        host, _, path = address.partition(":")
        try:
            if sys.platform != "linux" or host != host_here():
                raise OSError("the memory is on another host")
            return cls(address, _opened(path, size))
        except OSError as error:
            raise CompositionError(
                f"cannot attach to shared memory: {error}; start all workers on one host, or choose a strategy that "
                "sends messages"
            ) from None

    def array(self, dtype: npt.DTypeLike, count: int, offset: int = 0) -> npt.NDArray[np.generic]:
        """Return an array of `count` elements, from byte `offset` on, shared with all processes that have attached."""
        return np.frombuffer(self._map, dtype, count, offset)

    def discard(self, start: int, nbytes: int) -> None:
        """Return the whole pages inside a part of the segment to the system; the pages then hold zeros."""
        first, last = -(-start // mmap.PAGESIZE), (start + nbytes) // mmap.PAGESIZE
        if sys.platform == "linux" and first < last:
            self._map.madvise(mmap.MADV_REMOVE, first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE)

    @contextmanager
    def lock_byte(self, number: int) -> Iterator[None]:
        """Context manager that holds lock number `number` of the segment; the system releases the lock if the process
        dies.
        """
        fcntl.fcntl(self._descriptor, _LOCK_OF_DESCRIPTION, _lock(fcntl.F_WRLCK, number))
        try:
            yield
        finally:
            fcntl.fcntl(self._descriptor, _LOCK_OF_DESCRIPTION, _lock(fcntl.F_UNLCK, number))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Context manager that holds the lock of the whole segment, which only one process at a time can hold."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _opened(path: str, size: int) -> int:
    """A descriptor of the segment at `path`.

    Any other file is refused, so that a peer cannot make this process write to it.
    """
    if not (_PLACE.fullmatch(path) and str(Path(path).readlink()).startswith(f"/memfd:{_NAME} ")):
        raise OSError(f"{path[:80]!r} is not a shared-memory segment of flockstep")
    descriptor = os.open(path, os.O_RDWR)
    if (there := os.fstat(descriptor).st_size) < max(size, 1):
        os.close(descriptor)
        raise OSError(f"the segment has {there} bytes instead of {size}")
    return descriptor


def _too_much(size: int, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot allocate {size} bytes of shared memory: {error.strerror}; use a smaller model or array, or "
        "--transport ipc"
    )


def host_here() -> str:
    """Return an identifier of this host and its current boot.

    Processes in another network or process-id namespace count as being on another host.
    """
    if sys.platform != "linux":
        return platform.node()
    return f"{_BOOT.read_text().strip()}/{_NETWORK.stat().st_ino}/{_PROCESSES.stat().st_ino}"


def _lock(kind: int, number: int) -> bytes:
    """The system's struct flock for a lock on byte `number`."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)
