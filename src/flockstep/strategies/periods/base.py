"""The contract of a period."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from flockstep.collectives.base import Collective
from flockstep.expression import Component
from flockstep.nodes import Worker


class Period(Component):
    """How many local steps (H) replicas take between two meetings; all of them must come to the same answer."""

    noun: ClassVar[str] = "period"
    needs_job: ClassVar[bool] = False
    """It goes by the loss, which only a declared job can tell."""

    @property
    def every_step(self) -> bool:
        """Whether H is always 1."""
        return False

    def start(self, me: Worker) -> Any:
        """What it remembers, before the first step; it belongs to the worker's state."""
        return None

    @abstractmethod
    def due(self, me: Worker, state: Any, since: int) -> bool:
        """Whether replicas meet now; asked once after every step, `since` steps after the last meeting."""

    async def met(self, me: Worker, state: Any, collective: Collective) -> None:
        """Replicas have just met: the time to agree with the others on what is to come."""
