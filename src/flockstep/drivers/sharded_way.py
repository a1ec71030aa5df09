"""The program of one way of a model whose parameters are stored in shards (Rajbhandari et al. 2020, ZeRO stage 3).

For each unit of the model: gather its parameters, and compute its forward pass on this way's share of the batch; then,
backward, gather them again, compute, and reduce and scatter the gradient. All units use the same memory in turn; memory
of their own, freed after each pass, would leave holes in the heap.
"""

from __future__ import annotations

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.part_program import NeedPass, NeedRequest, PartProgram, PartRun, Ways, resumed
from flockstep.frameworks.shards import ShardedModel
from flockstep.frameworks.stages import MicroBatch


class ShardedWay(PartProgram):
    """One way of one replica: a worker that stores one shard of every unit."""

    def __init__(self, run: PartRun, model: ShardedModel):
        self._part = model.parts[run.number]
        super().__init__(run, self._part)
        self._units, self._ways, self._collective = model.units, model.parts, model.partition.collective
        self._group = Ways(range(len(self._ways)), run, self.mailbox)
        self._params: FlatArray = self.gradient.copy()
        largest = max(unit.schema.size + unit.borrowed for unit in self._units)
        self._gathered_unit: FlatArray = np.empty(largest, self._params.dtype)
        """The parameters of one unit at a time; the passes over a unit compute with this memory."""
        self._ties = list(enumerate(model.ties))
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
