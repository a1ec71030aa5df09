"""The contract of a transport."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import ClassVar

from flockstep.expression import Component


class Transport(Component):
    """How messages move between processes: where a node listens."""

    noun: ClassVar[str] = "transport"

    @abstractmethod
    def listen(self, directory: Path, name: str) -> str:
        """The address pattern to bind for a node called `name`; `directory` is private to the run."""
