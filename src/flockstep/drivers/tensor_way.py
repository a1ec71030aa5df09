"""The program of one way of a stage whose layers are split: passes, with sums over the ways between them (Shoeybi et
al. 2019).

A parameter of a layer that every way computes belongs to one way, whose worker trains the parameter. At each step the
other ways receive a copy, so that all ways compute with the same bits under every strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.group import WithoutSharedMemory
from flockstep.drivers.part_program import NeedPass, Send, resumed
from flockstep.drivers.stage import StageProgram
from flockstep.frameworks.base import Indices
from flockstep.frameworks.stages import MicroBatch
from flockstep.frameworks.ways import TensorModel, WayWeights
from flockstep.messages import Address, AnyNote, Array, Mailbox, Message, Wanted, frozen
from flockstep.nodes import Hosts
from flockstep.partitions.pipeline_schedules.base import PipelinePass


class Ways(WithoutSharedMemory):
    """One way as a member of the group of all ways of its stage; the group sums by messages."""

    def __init__(
        self, parts: Sequence[int], number: int, mailbox: Mailbox, send: Send, random: np.random.Generator
    ) -> None:
        """Create member `number` of the group of `parts`."""
        self.rank, self.workers, self.random = parts.index(number), len(parts), random
        self.hosts: Hosts = (tuple(range(len(parts))),)
        self._parts, self._number, self._mailbox, self._send = parts, number, mailbox, send

    def send(self, to: Address, tag: str, array: Array | None = None, note: AnyNote | None = None) -> None:
        """Send a message to another way of the stage; the array is copied."""
        copy = None if array is None else frozen(array)
        self._send(self._parts[to], Message(self._number, tag, copy, {} if note is None else note))

    def send_all(
        self, to: Iterable[Address], tag: str, array: Array | None = None, note: AnyNote | None = None
    ) -> None:
        """Send one message to each of several ways."""
        for rank in to:
            self.send(rank, tag, array, note)

    async def receive(self, tag: str, source: Address) -> Message:
        """Return the next message with the given tag from another way of the stage."""
        message: Message = await resumed(Wanted(tag, self._parts[source]))
        self.require_all(source)
        return message

    async def receive_array(self, tag: str, source: Address, into: Array | None = None) -> Array:
        """Return the array of the next message with the given tag from a way, in `into` if it is given."""
        array = (await self.receive(tag, source)).payload
        if into is None:
            return array
        into[:] = array
        return into

    def require_all(self, source: Address) -> None:
        """Check that no message of a way was lost."""
        self._mailbox.require_all(self._parts[source])


class TensorWay(StageProgram):
    """The program of one way of one stage of one replica; a model that is not cut has a single stage."""

    def __init__(
        self,
        rank: int,
        number: int,
        model: TensorModel,
        steps: int,
        batch: Callable[[], Indices],
        send: Send,
        random: Callable[[int], np.random.Generator],
        taken: int = 0,
    ):
        """Create a way, with the arguments of any stage."""
        self._ways = model.tensor.ways
        self._part, self._collective = model.parts[number], model.tensor.collective
        super().__init__(rank, number, model.pipeline, self._part, steps, batch, send, random, taken)
        first = self._at(self._stage) - number % self._ways
        self._group = Ways(range(first, first + self._ways), number, self.mailbox, send, random(taken))
        self._copies: dict[int, list[FlatArray]] = {}
        """Version of the weights → the parameters that every way computes with, as each way holds some of them."""

    async def _begin_step(self) -> None:
        await super()._begin_step()
        version = self.versions[-1]
        copied: list[FlatArray] = []
        if self._part.copies:
            own = self._part.copied(self._versions[version])
            copied = [one.copy() for one in await self._collective.all_gather(self._group, own)]
        self._copies[version] = copied
        self._copies = {version: self._copies[version] for version in self.versions}

    async def _outputs(
        self, work: PipelinePass, weights: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        held, given, loss = WayWeights(weights, self._copies[work.version]), inputs, 0.0
        shares = self._part.shares[work.chunk]
        for block, share in enumerate(shares):
            await resumed(NeedPass(work.step, share.forward, len(batch.indices)))
            given, loss = self._part.forward(work.chunk, block, held, batch, given)
            if block < len(shares) - 1:
                given = await self._sum(given)
        return given, loss

    async def _slopes(self, work: PipelinePass, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        shares = self._part.shares[work.chunk]
        for block in reversed(range(len(shares))):
            await resumed(NeedPass(work.step, shares[block].backward, len(batch.indices)))
            errors = self._part.backward(work.chunk, block, batch, errors, self.gradient)
            if block:
                errors = await self._sum(errors)
        return errors

    async def _sum(self, term: FlatArray | None) -> FlatArray | None:
        """Return the sum of the terms of all ways, with the same bits on each; None if there is none."""
        if term is None:
            return None
        total = term.reshape(-1).copy()
        await self._collective.all_reduce(self._group, total)
        return total.reshape(term.shape)
