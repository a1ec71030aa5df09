"""Transports between processes on one host or on several hosts."""

from __future__ import annotations

import functools
import platform
import sys
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flockstep.arrays.kernels.jit import COMPILES
from flockstep.errors import ConfigurationError
from flockstep.expression import Component
from flockstep.links.addresses import (
    ANY_PORT,
    interface_address,
    is_loopback,
    is_numeric,
    ports_of,
    resolved,
    tcp_address,
)
from flockstep.links.connection import LINK_TIMEOUT
from flockstep.links.shared_group import needed, room_for
from flockstep.links.shared_memory import SharedMemory
from flockstep.links.wire import SenderIdentity

if TYPE_CHECKING:
    from flockstep.links.streams import StreamBus


class Transport(Component):
    """A way to move messages between processes, such as Unix sockets or TCP. It creates the bus of each node."""

    noun: ClassVar[str] = "transport"

    @property
    def zero_copy(self) -> bool:
        """Whether nodes on one host read large arrays directly in each other's memory."""
        return False

    @property
    def encrypts(self) -> bool:
        """Whether the transport encrypts connections between nodes."""
        return False

    def share(self, workers: int, model_bytes: int) -> SharedMemory | None:
        """Create a shared-memory segment for sums over all workers; None if the workers may be on several hosts."""
        return None

    def prepare(self, directory: Path) -> None:
        """Create the resources that the nodes' `listen` needs; called once, by the supervisor before it starts the
        nodes.
        """
        return

    def clean_up(self, directory: Path) -> None:
        """Remove the resources that `prepare` and `listen` have created outside `directory`; called once, at the end of
        the run.
        """
        return

    def bus(
        self,
        me: SenderIdentity,
        directory: Path,
        name: str,
        heartbeat: float = 5.0,
        link_timeout: float = LINK_TIMEOUT,
    ) -> StreamBus:
        """Create the bus of node `me`, which is called `name` in error messages; `directory` is private to the run.

        If a connection to another host is silent for `heartbeat` seconds, it is opened again. The peer counts as
        unreachable once the connection has been interrupted for `link_timeout` seconds.
        """
        from flockstep.links.streams import StreamBus

        return StreamBus(me, self.listen(directory, name), self.zero_copy, self.encrypts, heartbeat, link_timeout)

    @abstractmethod
    def listen(self, directory: Path, name: str) -> str:
        """Return the address at which a node called `name` listens: ipc://PATH, or tcp://HOST:PORTS, where * is any
        free port.
        """


@dataclass(frozen=True)
class Ipc(Transport):
    """Unix sockets in a folder that only the user of the run can enter, for processes on one host."""

    def listen(self, directory: Path, name: str) -> str:
        return f"ipc://{directory / name}"


@dataclass(frozen=True)
class InSharedMemory(Ipc):
    """Sends messages through Unix sockets, and large payloads and sums through shared memory.

    The transport requires Linux on x86-64 or AArch64.
    """

    def __post_init__(self) -> None:
        _require_memory("--transport ipc")

    @property
    def zero_copy(self) -> bool:
        """True: nodes read large arrays in each other's memory, because all nodes are on one host."""
        return True

    def share(self, workers: int, model_bytes: int) -> SharedMemory:
        return SharedMemory.create(needed(workers, room_for(model_bytes)))


@dataclass(frozen=True)
class Tcp(Transport):
    """TCP on a free port of `host`, by default the loopback address.

    `host` is an IPv4 or IPv6 address of this machine, or a name, which is resolved once. With `interface`, the address
    is that of the network interface instead: the IPv4 address, or the IPv6 address if there is no other. `ports` is a
    port or a range of ports, such as '29500-29600', of which each node takes a free one; without it the system chooses.

    With `memory`, nodes of one host read large arrays in each other's memory: when nodes connect, each attaches to the
    other's memory and verifies a token. A network namespace counts as a separate host.

    Both ends of a connection prove that they know the secret of the run. With `encrypt`, connections between hosts are
    encrypted with AES-256-GCM, so that a changed byte is detected; connections over the loopback address are not
    encrypted. Without encryption, an attacker on the network between two hosts can read and change what is sent.

    Raises:
        ConfigurationError: host or interface has no address that peers can connect to, or the ports are not a range.
    """

    host: str = "127.0.0.1"
    memory: bool = False
    encrypt: bool = True
    interface: str = ""
    ports: str | int = ""

    def __post_init__(self) -> None:
        if self.interface and self.host != type(self).host:
            raise ConfigurationError(
                f"give either host or interface, got both host={self.host!r} and interface={self.interface!r}"
            )
        if is_numeric(self.host):
            resolved(self.host)  # a name is resolved where it is used
        ports_of(self._ports)
        if self.memory:
            _require_memory("memory=false")

    @property
    def zero_copy(self) -> bool:
        """Whether nodes of one host read arrays in each other's memory, as the field `memory` says."""
        return self.memory

    @property
    def encrypts(self) -> bool:
        """Whether messages are encrypted: never on a loopback address, otherwise as the field `encrypt` says."""
        return self.encrypt and not is_loopback(self._address)

    def listen(self, directory: Path, name: str) -> str:
        return tcp_address(self._address, self._ports)

    @property
    def _ports(self) -> str:
        return ANY_PORT if self.ports == "" else str(self.ports)

    @functools.cached_property
    def _address(self) -> str:
        """The numeric address of the host or the interface."""
        return interface_address(self.interface) if self.interface else resolved(self.host)


def _require_memory(instead: str) -> None:
    # Without numba, counters are written by plain stores, which only x86-64 keeps in order.
    if sys.platform != "linux" or platform.machine() not in ("x86_64", *(("aarch64",) if COMPILES else ())):
        raise ConfigurationError(
            f"shared memory needs Linux on x86_64, or on aarch64 with numba, got {sys.platform} on "
            f"{platform.machine()}; use {instead}, or pip install 'flockstep[fast]'"
        )
