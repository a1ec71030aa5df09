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

    def share(self, workers: int, servers: int, model_bytes: int) -> SharedMemory | None:
        """A segment for the arrays of so many nodes, each as large as the model at most; None: they share no memory."""
        return None

    def clean_up(self, directory: Path) -> None:
        """Take away what `listen` has made beyond that directory; called once, when the run is over."""
        return

    def bus(self, me: Identity, directory: Path, name: str, heartbeat: float) -> Bus:
        """A bus for the node `me`, which listens as `listen` says; `heartbeat` in seconds."""
        from flockstep.transports.zeromq import Endpoint

        return Endpoint(me, self.listen(directory, name), heartbeat)

    @abstractmethod
    def listen(self, directory: Path, name: str) -> str:
        """The address pattern to bind for a node called `name`; `directory` is private to the run."""
