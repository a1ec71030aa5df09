"""The program of one way of a stage whose layers are split over several ways (Shoeybi et al. 2019): passes, with sums
over the ways between them.

A parameter of a layer that every way computes belongs to one way, whose worker trains the parameter. At each step the
other ways receive a copy, so that all ways compute with the same bits under every strategy.
"""

from __future__ import annotations

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.part_program import NeedPass, PartRun, resumed
from flockstep.drivers.stage import StageProgram
from flockstep.drivers.ways import Ways
from flockstep.frameworks.stages import MicroBatch
from flockstep.frameworks.ways import TensorModel, WayWeights
from flockstep.partitions.pipeline_schedules.base import PipelinePass


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
        shares, samples = self._part.shares[work.chunk], len(batch.indices)
        if work.kind == "weight_backward":
            await resumed(NeedPass(work.step, sum(one.weight_backward for one in shares), samples))
            self._part.weight_backward(work.chunk, batch, self.gradient)
            return None
        for block in reversed(range(len(shares))):
            await resumed(NeedPass(work.step, getattr(shares[block], work.kind), samples))
            if work.kind == "backward":
                errors = self._part.backward(work.chunk, block, batch, errors, self.gradient)
            else:
                errors = self._part.input_backward(work.chunk, block, batch, errors)
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
