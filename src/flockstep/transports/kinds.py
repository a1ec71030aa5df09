"""Transports between processes of one host or of several hosts."""

from __future__ import annotations

import ipaddress
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from flockstep.errors import ConfigurationError
from flockstep.transports.base import Transport
from flockstep.transports.shared_group import needed, room_for
from flockstep.transports.shared_memory import SharedMemory


@dataclass(frozen=True)
class Ipc(Transport):
    """Unix sockets in a directory of the run that only its owner can enter."""

    def listen(self, directory: Path, name: str) -> str:
        return f"ipc://{directory / name}"


@dataclass(frozen=True)
class InSharedMemory(Ipc):
    """Unix sockets for messages; large payloads and sums in shared memory. Requires Linux on x86-64 or AArch64."""

    def __post_init__(self) -> None:
        _require_memory("--transport ipc")

    @property
    def zero_copy(self) -> bool:
        """True: all nodes are on one host."""
        return True

    def share(self, workers: int, model_bytes: int) -> SharedMemory:
        return SharedMemory.create(needed(workers, room_for(model_bytes)))


@dataclass(frozen=True)
class Tcp(Transport):
    """TCP on a free port of `host`, by default the loopback address.

    With `memory`, nodes of one host read large arrays in each other's memory: when nodes connect, each attaches to the
    other's memory and verifies a token. A network namespace counts as a separate host.

    Both ends of a connection prove that they know the secret of the run. With `encrypt`, connections between hosts are
    encrypted with AES-256-GCM; connections over the loopback address are not.
    """

    host: str = "127.0.0.1"
    memory: bool = False
    encrypt: bool = True

    def __post_init__(self) -> None:
        try:
            ipaddress.IPv4Address(self.host)
        except ValueError:
            raise ConfigurationError(
                f"host must be an IPv4 address of this machine, got {self.host!r}; use 127.0.0.1"
            ) from None
        if self.memory:
            _require_memory("memory=false")

    @property
    def zero_copy(self) -> bool:
        """Whether the transport lends shared memory, as its field `memory` says."""
        return self.memory

    @property
    def encrypts(self) -> bool:
        """The field `encrypt`, unless `host` is a loopback address."""
        return self.encrypt and not ipaddress.IPv4Address(self.host).is_loopback

    def listen(self, directory: Path, name: str) -> str:
        return f"tcp://{self.host}:*"


def _require_memory(instead: str) -> None:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise ConfigurationError(
            f"shared memory needs Linux on x86_64 or aarch64, got {sys.platform} on {platform.machine()}; use {instead}"
        )
