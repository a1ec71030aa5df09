"""The interface of a synchronization schedule."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from flockstep.collectives.base import Collective
from flockstep.expression import Component
from flockstep.nodes import Worker


class SynchronizationSchedule(Component):
    """The interface of a synchronization schedule, which decides after how many local steps (H) the replicas are
    averaged. All workers must decide the same.
    """

    noun: ClassVar[str] = "synchronization_schedule"
    needs_job: ClassVar[bool] = False
    """Whether the period depends on the loss, which only a declared job provides."""

    @property
    def every_step(self) -> bool:
        """Whether the period H is always 1."""
        return False

    def start(self, me: Worker) -> Any:
        """Return the schedule's state before the first step; the state is kept in the worker's state."""
        return None

    @abstractmethod
    def due(self, me: Worker, state: Any, since: int) -> bool:
        """Return whether replicas are averaged now. The method is called once after every step, `since` steps after the
        last average.
        """

    async def met(self, me: Worker, state: Any, collective: Collective) -> None:
        """Agree with the other workers on the next period H. The method is called right after every average."""
