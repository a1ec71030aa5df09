"""Memory that processes of one host share, without a name that could be left behind."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flockstep.errors import CompositionError, ConfigurationError

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SharedMemory:
    """A segment of zeros that belongs to no file: it is gone with the last process that uses it, however that ends.

    `address` is what another process of this host needs to attach; it works as long as the creating process lives.
    """

    def __init__(self, address: str, descriptor: int):
        self.address = address
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, self.size)
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """A new segment of `size` bytes.

        Raises:
            ConfigurationError: this system has none.
        """
        if sys.platform != "linux":
            raise ConfigurationError(f"shared memory needs Linux, got {sys.platform}; choose a strategy with messages")
        descriptor = os.memfd_create("flockstep")
        os.ftruncate(descriptor, size)
        return cls(f"{_host()}:/proc/{os.getpid()}/fd/{descriptor}", descriptor)

    @classmethod
    def attach(cls, address: str) -> SharedMemory:
        """The segment that another process created.

        Raises:
            CompositionError: it lies on another host, or its process is gone.
        """
        host, _, path = address.partition(":")
        try:
            if sys.platform != "linux" or host != _host():
                raise OSError("it lies on another host")
            return cls(address, os.open(path, os.O_RDWR))
        except OSError as error:
            raise CompositionError(
                f"cannot attach to shared memory: {error}; start all workers on one host, or choose a strategy that "
                "sends messages"
            ) from None

    def array(self, dtype: npt.DTypeLike, count: int, offset: int = 0) -> npt.NDArray[np.generic]:
        """`count` elements from byte `offset` on: what one process writes there, all others see."""
        return np.frombuffer(self._map, dtype, count, offset)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep all other processes out of their `lock` meanwhile."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)


def _host() -> str:
    """What tells this host from others, and from itself after a restart."""
    return _BOOT.read_text().strip()
