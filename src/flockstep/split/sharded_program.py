"""The programs of workers that store shards (Rajbhandari et al. 2020, ZeRO stage 3).

A `ShardedWay` stores shards of a whole model. For each unit of the model, it gathers the unit's parameters and computes
its forward pass on this way's share of the batch; then, backward, it gathers them again, computes, and reduces and
scatters the gradient. All units use the same memory in turn; memory of their own, freed after each pass, would leave
holes in the heap.

A `PartShard` stores a shard of a part of a split model. Its program wraps the unchanged program of the part: it gathers
the part's parameters, lets the program compute its step on this worker's share of the batch, and then reduces and
scatters the part's gradient. The W workers of a part so compute what W replicas of the model without shards would.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import msgspec
import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Indices
from flockstep.messages import PART, Message, Wanted
from flockstep.split.program import NeedPass, NeedRequest, PartEffect, PartProgram, PartRun, Send, Ways, resumed
from flockstep.split.shards import ShardedModel, ShardedPartsModel
from flockstep.split.stages import MicroBatch


class ShardedWay(PartProgram):
    """One way of one replica: a worker that stores one shard of every unit."""

    def __init__(self, run: PartRun, model: ShardedModel):
        self._part = model.parts[run.number]
        super().__init__(run, self._part)
        self._units, self._ways, self._collective = model.inner.parts, model.parts, model.partition.collective
        self._group = Ways(range(len(self._ways)), run, self.mailbox)
        self._params: FlatArray = self.gradient.copy()
        largest = max(unit.schema.size + unit.borrowed for unit in self._units)
        self._gathered_unit: FlatArray = np.empty(largest, self._params.dtype)
        """The parameters of one unit at a time; the passes over a unit compute with this memory."""
        self._ties = list(enumerate(model.inner.ties))
        self._lent: dict[int, FlatArray] = {}
        """Number of a tie → the parameter, until its user's backward pass, then the gradient of this use."""

    def requested(self, params: FlatArray) -> None:
        self._params[:] = params

    async def program(self) -> None:
        await resumed(NeedRequest())
        for step in range(self._run.taken, self._run.steps):
            await self._compute(self._share(step))
            await resumed(NeedRequest())

    def _share(self, step: int) -> MicroBatch:
        """Draw the replica's batch, and return this way's share."""
        batch = MicroBatch(self.rank, step, self.number, self._run.batch(), 1.0)
        return batch.divided(len(self._ways), "sharded")[self.number]

    async def _compute(self, batch: MicroBatch) -> None:
        """Compute the loss of a batch, and this way's shards of its gradient."""
        between, own = None, 0.0
        for number, unit in enumerate(self._units):
            params = await self._gathered(number)
            self._lent.update({one: params[tie.lent].copy() for one, tie in self._ties if tie.owner == number})
            await resumed(NeedPass(batch.step, unit.shares[0].forward, len(batch.indices)))
            between, own = unit.forward(0, params, batch, between)
        errors = None
        for number, unit in reversed(list(enumerate(self._units))):
            params = await self._gathered(number)
            await resumed(NeedPass(batch.step, unit.shares[0].backward, len(batch.indices)))
            slope = np.zeros_like(params)
            errors = unit.backward(0, batch, errors, slope)
            for one, tie in self._ties:
                if tie.user == number:
                    self._lent[one] = slope[tie.borrowed].copy()
                elif tie.owner == number:
                    slope[tie.lent] += self._lent.pop(one)
            slope = slope[: unit.schema.size]
            _, self.gradient[self._part.places[number]] = await self._collective.reduce_scatter(self._group, slope)
        losses = await self._collective.all_gather(self._group, np.array([own]))
        self.loss = float(sum(one[0] for one in losses))

    async def _gathered(self, number: int) -> FlatArray:
        """Return the parameters (K + B,) of a unit: K from the shards of all ways, then B that other units lend.

        The next unit's parameters overwrite them.
        """
        unit = self._units[number]
        own = self._params[self._part.places[number]]
        params = self._gathered_unit[: unit.schema.size + unit.borrowed]
        for way, shard in zip(self._ways, await self._collective.all_gather(self._group, own), strict=True):
            params[way.spans[number]] = shard
        for one, tie in self._ties:
            if tie.user == number:
                params[tie.borrowed] = self._lent[one]
        return params


class PartShard(PartProgram):
    """The program of one shard of one part of one replica.

    Messages between workers with the same shard number belong to the inner program; those between the workers of a part
    belong to the collectives.
    """

    def __init__(
        self, run: PartRun, model: ShardedPartsModel, inside: Callable[[Callable[[], Indices], Send], PartProgram]
    ):
        """`inside`: function (batch, send) that returns the program of the whole part."""
        super().__init__(run, model.parts[run.number])
        self._ways, self._collective = model.partition.sharded.ways, model.partition.sharded.collective
        part, self._shard = divmod(run.number, self._ways)
        mine = range(part * self._ways, (part + 1) * self._ways)
        self._group = Ways(mine, run, self.mailbox)
        self._spans = [model.parts[one].spans[0] for one in mine]
        self._own = self._spans[self._shard]
        self._gathered: FlatArray | None = None
        """The parameters (K,) of the part, from the request for a step until the inner program has a copy."""
        self._shares: deque[float] = deque()
        """This worker's share of the samples of each batch that has been drawn, up to the end of the batch's step."""
        self._inner = inside(self._own_samples, self._send_inside)
        self._inner_program = self._inner.program()

    def requested(self, params: FlatArray) -> None:
        self._gathered = np.empty_like(self._inner.gradient)
        self._gathered[self._own] = params

    async def program(self) -> None:
        await self._until_request()
        await resumed(NeedRequest())
        for _ in range(self._run.taken, self._run.steps):
            await self._gather()
            await self._until_request()
            await self._reduce(self._shares.popleft())
            await resumed(NeedRequest())

    def _own_samples(self) -> Indices:
        """Draw the replica's batch, and return this worker's share of its samples."""
        batch = MicroBatch(self.rank, 0, self.number, self._run.batch(), 1.0).divided(self._ways, "sharded")
        self._shares.append(batch[self._shard].share)
        return batch[self._shard].indices

    async def _gather(self) -> None:
        """Give the inner program the parameters of the part, from the shards of its workers."""
        params, self._gathered = self._gathered, None
        assert params is not None
        shards = await self._collective.all_gather(self._group, params[self._own])
        for span, shard in zip(self._spans, shards, strict=True):
            params[span] = shard
        self._inner.requested(params)

    async def _reduce(self, share: float) -> None:
        """Store this worker's shard of gradient and loss of the batch; `share`: its share of the samples."""
        slope = self._inner.gradient
        slope *= share
        _, self.gradient[:] = await self._collective.reduce_scatter(self._group, slope)
        losses = await self._collective.all_gather(self._group, np.array([self._inner.loss * share]))
        self.loss = float(sum(one[0] for one in losses))

    @types.coroutine
    def _until_request(self) -> Generator[PartEffect, Any, None]:
        """Run the inner program until it waits for the next request, which is at its beginning and after each step."""
        message: Message | None = None
        while not isinstance(effect := self._inner_program.send(message), NeedRequest):
            if not isinstance(effect, Wanted):
                message = yield effect
                continue
            assert effect.source is not None
            source = PART + self._outside(effect.source - PART)
            message = yield msgspec.structs.replace(effect, source=source)
            self.mailbox.require_all(source)

    def _send_inside(self, to: int, message: Message) -> None:
        """Send a message of the inner program to the worker with the same shard of part `to`."""
        message.source = PART + self.number
        self._run.send(self._outside(to), message)

    def _outside(self, part: int) -> int:
        """Return the number of the worker with the same shard of a part of the inner partition."""
        return part * self._ways + self._shard
