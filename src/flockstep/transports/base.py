"""The contract of a transport."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from flockstep.expression import Component
from flockstep.transports.bus import Bus
from flockstep.transports.shared_memory import SharedMemory
from flockstep.transports.wire import Identity


class Transport(Component):
    """How messages move between processes: makes the bus of a node."""

    noun: ClassVar[str] = "transport"

    @property
    def lends(self) -> bool:
        """Whether nodes of one host read large arrays in each other's memory."""
        return False

    def share(self, workers: int, model_bytes: int) -> SharedMemory | None:
        """A segment for sums over all workers, who are on one host; None: they may be on several."""
        return None

    def clean_up(self, directory: Path) -> None:
        """Take away what `listen` has made beyond that directory; called once, when the run is over."""
        return

    def bus(self, me: Identity, directory: Path, name: str) -> Bus:
        """A bus for the node `me`, called `name`; `directory` is private to the run."""
        from flockstep.transports.streams import StreamBus

        return StreamBus(me, self.listen(directory, name), self.lends)

    @abstractmethod
    def listen(self, directory: Path, name: str) -> str:
        """The address to listen at for a node called `name`: ipc://PATH, or tcp://HOST:* for any free port."""
