"""Memory that processes of one host share, without a name that could be left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
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

_LOCK_OF_DESCRIPTION = 38
"""F_OFD_SETLKW: waits for a lock that belongs to whoever has opened the segment, not to the process."""
_NAME = "flockstep"
_PLACE = re.compile(r"/proc/[0-9]+/fd/[0-9]+")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


class SharedMemory:
    """A segment of zeros that belongs to no file: it is gone with the last process that uses it, however that ends.

    `address` is what another process of this host needs to attach; it works as long as the creating process lives.
    """

    def __init__(self, address: str, descriptor: int):
        self.address = address
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._map = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """A new segment of `size` bytes.

        Raises:
            ConfigurationError: this system has none, or not that much.
        """
        if sys.platform != "linux":
            raise ConfigurationError(f"shared memory needs Linux, got {sys.platform}; choose a strategy with messages")
        descriptor = os.memfd_create(_NAME)
        try:
            os.ftruncate(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise _too_much(size, error) from None
        try:
            return cls(f"{_host()}:/proc/{os.getpid()}/fd/{descriptor}", descriptor)
        except OSError as error:
            raise _too_much(size, error) from None

    @classmethod
    def attach(cls, address: str, size: int = 0) -> SharedMemory:
        """The segment of at least `size` bytes that another process created.

        Raises:
            CompositionError: it lies on another host, its process is gone, or it is none of ours.
        """
        host, _, path = address.partition(":")
        try:
            if sys.platform != "linux" or host != _host():
                raise OSError("it lies on another host")
            return cls(address, _opened(path, size))
        except OSError as error:
            raise CompositionError(
                f"cannot attach to shared memory: {error}; start all workers on one host, or choose a strategy that "
                "sends messages"
            ) from None

    def array(self, dtype: npt.DTypeLike, count: int, offset: int = 0) -> npt.NDArray[np.generic]:
        """`count` elements from byte `offset` on: what one process writes there, all others see."""
        return np.frombuffer(self._map, dtype, count, offset)

    @contextmanager
    def lock_byte(self, number: int) -> Iterator[None]:
        """Keep all other processes out of their `lock_byte` of that number; who dies inside lets go of it."""
        fcntl.fcntl(self._descriptor, _LOCK_OF_DESCRIPTION, _lock(fcntl.F_WRLCK, number))
        try:
            yield
        finally:
            fcntl.fcntl(self._descriptor, _LOCK_OF_DESCRIPTION, _lock(fcntl.F_UNLCK, number))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep all other processes out of their `lock` meanwhile."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _opened(path: str, size: int) -> int:
    """A descriptor of the segment at `path`; whoever named it may not make this process write into any other file."""
    if not (_PLACE.fullmatch(path) and str(Path(path).readlink()).startswith(f"/memfd:{_NAME} ")):
        raise OSError(f"{path[:80]!r} is no segment of flockstep's")
    descriptor = os.open(path, os.O_RDWR)
    if (there := os.fstat(descriptor).st_size) < max(size, 1):
        os.close(descriptor)
        raise OSError(f"it has {there} bytes, where {size} are due")
    return descriptor


def _too_much(size: int, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot share {size} bytes of memory: {error.strerror}; use a smaller model or array, or --transport ipc"
    )


def _host() -> str:
    """What tells this host from others, and from itself after a restart; a network namespace counts as a host."""
    return f"{_BOOT.read_text().strip()}/{_NETWORK.stat().st_ino}"


def _lock(kind: int, number: int) -> bytes:
    """The system's description of a lock on one byte."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, number, 1, 0)
