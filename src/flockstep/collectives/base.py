"""The contract of a collective."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from flockstep.arrays.schema import FlatArray
from flockstep.expression import Component
from flockstep.nodes import Worker


class Collective(Component):
    """An exchange in which every worker takes part, written over point-to-point messages."""

    noun: ClassVar[str] = "collective"

    @abstractmethod
    async def all_reduce(self, me: Worker, array: FlatArray) -> None:
        """Replace `array` on every worker by the sum over all workers, identical in every bit on all of them.

        Raises:
            PeerLost: a worker died, so that the sum cannot be completed.
            ProtocolError: a message got lost, so that another one would be taken for it.
        """

    async def average(self, me: Worker, array: FlatArray) -> None:
        """Replace `array` on every worker by the mean over all workers."""
        if me.workers > 1:
            await self.all_reduce(me, array)
            array /= me.workers


async def received(me: Worker, tag: str, source: int) -> FlatArray:
    """The array of the next message with that tag from that worker, none of whose messages may be missing.

    Raises:
        PeerLost: the worker has left or was lost.
        ProtocolError: one of its messages got lost.
    """
    message = await me.receive(tag, source)
    me.mailbox.require_all(source)
    return message.payload
