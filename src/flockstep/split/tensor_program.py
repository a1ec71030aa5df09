"""The program of one way of a stage whose layers are split over several ways (Shoeybi et al. 2019): passes, with sums
over the ways between them.

A parameter of a layer that every way computes belongs to one way, whose worker trains the parameter. At each step the
other ways receive a copy, so that all ways compute with the same bits under every strategy.

The layers before the first split layer may be divided by samples (Krizhevsky 2014): the ways gather the activations of
all samples, return the gradients of the activations, and sum the gradients of the parameters on the ways that train
the parameters.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from flockstep.arrays.schema import FlatArray, slices
from flockstep.collectives.exchange import sum_shares
from flockstep.partitions.pipeline_schedules import PipelinePass
from flockstep.split.program import NeedPass, PartRun, Ways, resumed
from flockstep.split.stage_program import StageProgram
from flockstep.split.stages import MicroBatch
from flockstep.split.ways import TensorModel, WayWeights


class TensorWay(StageProgram):
    """The program of one way of one stage of one replica; a model that is not cut has a single stage."""

    def __init__(self, run: PartRun, model: TensorModel):
        self._ways = model.tensor.ways
        self._part, self._collective = model.parts[run.number], model.tensor.collective
        super().__init__(run, self._part, model.pipeline)
        first = run.number - run.number % self._ways
        self._group = Ways(range(first, first + self._ways), run, self.mailbox)
        self._copies: dict[int, list[FlatArray]] = {}
        """Version of the weights → the parameters that every way computes with, as each way holds some of them."""
        self._slope = np.zeros(len(self.gradient) + self._part.borrowed, self.gradient.dtype)
        """Gradient (K + B,) of this way's parameters, and of the parameters of divided layers that other ways train."""
        self.gradient = self._slope[: len(self.gradient)]

    async def _begin_step(self) -> None:
        await super()._begin_step()
        self._slope[:] = 0
        version = self.versions[-1]
        copied: list[FlatArray] = []
        if self._part.copies:
            own = self._part.copied(self._versions[version])
            copied = [one.copy() for one in await self._collective.all_gather(self._group, own)]
        self._copies[version] = copied
        self._copies = {version: self._copies[version] for version in self.versions}

    async def _end_step(self, step: int) -> None:
        if self._part.divided_parameters:
            await sum_shares(self._group, self._slope, self._part.divided_parameters)

    async def _outputs(
        self, work: PipelinePass, weights: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        held, given, loss = WayWeights(weights, self._copies[work.version]), inputs, 0.0
        shares = self._part.shares[work.chunk]
        for block, share in enumerate(shares):
            if self._part.divides(work.chunk, block):
                given = await self._gathered(work, held, batch)
            await resumed(NeedPass(work.step, share.forward, len(batch.indices)))
            given, loss = self._part.forward(work.chunk, block, held, batch, given)
            if block < len(shares) - 1:
                given = await self._sum(given)
        return given, loss

    async def _slopes(self, work: PipelinePass, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        shares, samples = self._part.shares[work.chunk], len(batch.indices)
        if work.kind == "weight_backward":
            await resumed(NeedPass(work.step, sum(one.weight_backward for one in shares), samples))
            self._part.weight_backward(work.chunk, batch, self._slope)
            return None
        out = self._slope if work.kind == "backward" else None
        for block in reversed(range(len(shares))):
            await resumed(NeedPass(work.step, getattr(shares[block], work.kind), samples))
            if self._part.divides(work.chunk, block):
                batch = self._own_share(batch)
            errors = self._part.backward(work.chunk, block, batch, errors, out)
            if block and self._part.divides(work.chunk, block - 1):
                errors = await self._returned(errors, samples)
            elif block:
                errors = await self._sum(errors)
        return errors

    def _own_share(self, batch: MicroBatch) -> MicroBatch:
        """Return this way's share of the samples of a micro-batch."""
        return batch.divided(self._ways, "tensor")[self._group.rank]

    async def _gathered(self, work: PipelinePass, weights: WayWeights, batch: MicroBatch) -> FlatArray:
        """Compute the divided layers for this way's samples, and return their outputs for all samples."""
        samples, share = self._own_share(batch), self._part.shares[work.chunk][0].divided
        await resumed(NeedPass(work.step, share, len(batch.indices)))
        own = self._part.divided(weights, samples)
        every: FlatArray = np.concatenate(await self._collective.all_gather(self._group, own.reshape(-1)))
        return every.reshape(-1, *own.shape[1:])

    async def _returned(self, term: FlatArray | None, samples: int) -> FlatArray | None:
        """Return the sum of the terms of all ways for this way's samples; None if there is none."""
        if term is None:
            return None
        terms = term.reshape(-1).copy()
        starts = [len(terms) * part.start // samples for part in slices(samples, self._ways)]
        shares = [slice(start, stop) for start, stop in pairwise([*starts, len(terms)])]
        return (await sum_shares(self._group, terms, shares)).reshape(-1, *term.shape[1:])

    async def _sum(self, term: FlatArray | None) -> FlatArray | None:
        """Return the sum of the terms of all ways, with the same bits on each; None if there is none."""
        if term is None:
            return None
        total = term.reshape(-1).copy()
        await self._collective.all_reduce(self._group, total)
        return total.reshape(term.shape)
