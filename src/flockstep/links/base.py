"""The interface of a transport."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from flockstep.expression import Component
from flockstep.links.bus import Bus
from flockstep.links.connection import LINK_TIMEOUT
from flockstep.links.shared_memory import SharedMemory
from flockstep.links.wire import SenderIdentity


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
    ) -> Bus:
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
