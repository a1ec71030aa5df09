"""The contract of a collective."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np

from flockstep.arrays.kernels import numpy_dtype
from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
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

    async def all_gather(self, me: Worker, array: FlatArray) -> list[FlatArray]:
        """The arrays of all workers, in order of rank; they may differ in size. Around a ring: n-1 messages each."""
        n, rank = me.workers, me.rank
        gathered = [array] * n
        for hop in range(n - 1):
            me.send((rank + 1) % n, "pass", gathered[(rank - hop) % n])
            gathered[(rank - hop - 1) % n] = await received(me, "pass", (rank - 1) % n)
        return gathered

    async def average(self, me: Worker, array: FlatArray) -> None:
        """Replace `array` on every worker by the mean over all workers."""
        if me.workers > 1:
            await self.all_reduce(me, array)
            array /= me.workers

    async def sum_encoded(self, me: Worker, data: Bytes, codec: Codec, size: int, dtype: str) -> FlatArray:
        """The sum (size,) over all workers of what their encodings stand for, identical in every bit on all of them.

        Encodings of a linear codec are added term by term on their way; others are gathered, and decoded in order of
        rank.
        """
        if codec.linear:
            data = data.copy()
            await self.all_reduce(me, codec.terms(data, size, dtype))
            return codec.decode(data, size, dtype)
        total: FlatArray = np.zeros(size, numpy_dtype(dtype))
        for piece in await self.all_gather(me, data):
            codec.add_decoded(piece, total)
        return total


async def received(me: Worker, tag: str, source: int) -> FlatArray:
    """The array of the next message with that tag from that worker, none of whose messages may be missing.

    Raises:
        PeerLost: the worker has left or was lost.
        ProtocolError: one of its messages got lost.
    """
    message = await me.receive(tag, source)
    me.mailbox.require_all(source)
    return message.payload
