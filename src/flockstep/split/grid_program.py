"""The program of one worker of a grid (Coates et al. 2013): passes over the worker's rectangles, and exchanges of the
activations and gradients that cross a border.
"""

from __future__ import annotations

from collections.abc import Mapping

from flockstep.arrays.schema import FlatArray
from flockstep.messages import frozen
from flockstep.partitions.pipeline_schedules import PipelinePass
from flockstep.split.grid import GridModel
from flockstep.split.program import NeedPass, PartRun, resumed
from flockstep.split.stage_program import TAGS, PipelineStage, StageNote
from flockstep.split.stages import MicroBatch


class GridWay(PipelineStage):
    """The program of one worker of the grid that holds one replica."""

    def __init__(self, run: PartRun, model: GridModel):
        self._ways = len(model.parts)
        super().__init__(run, model.parts[run.number], model.pipeline, model.ties)
        self._exchanges = model.exchanges

    async def _outputs(
        self, work: PipelinePass, weights: FlatArray, batch: MicroBatch, inputs: FlatArray | None
    ) -> tuple[FlatArray | None, float]:
        given, loss = inputs, 0.0
        for chunk in range(len(self._exchanges) + 1):
            if chunk:
                assert given is not None
                given = await self._fetch(chunk - 1, work, given)
            if chunk < len(self._part.shares):
                await resumed(NeedPass(work.step, self._part.shares[chunk].forward, len(batch.indices)))
                given, loss = self._part.forward(chunk, weights, batch, given)
        return None, loss

    async def _slopes(self, work: PipelinePass, batch: MicroBatch, errors: FlatArray | None) -> FlatArray | None:
        for chunk in reversed(range(len(self._exchanges) + 1)):
            if chunk < len(self._part.shares):
                await resumed(NeedPass(work.step, self._part.shares[chunk].backward, len(batch.indices)))
                errors = self._part.backward(chunk, batch, errors, self._slope)
            if chunk:
                errors = await self._send_back(chunk - 1, work, errors)
        return None

    async def _fetch(self, number: int, work: PipelinePass, outputs: FlatArray) -> FlatArray | None:
        """Send the outputs that other workers read, and return the inputs of this worker."""
        exchange = self._exchanges[number]
        self._send_pieces(f"{TAGS['forward']} {number}", exchange.pieces(self.number, outputs), work, 0.0)
        arrived: dict[int, FlatArray] = {}
        for other, places in exchange.fetched(self.number).items():
            message = await self._message(f"{TAGS['forward']} {number}", other, work.step, work.microbatch)
            arrived[other] = message.payload.reshape(-1, exchange.channels, *places.size)
        return exchange.inputs(self.number, outputs, arrived)

    async def _send_back(self, number: int, work: PipelinePass, errors: FlatArray | None) -> FlatArray:
        """Send the gradients of inputs back to the workers that hold them, and return the gradient of the outputs."""
        exchange, loss = self._exchanges[number], self._own[work.step, work.microbatch]
        self._send_pieces(f"{TAGS['backward']} {number}", exchange.slopes(self.number, errors), work, loss)
        arrived: dict[int, FlatArray] = {}
        for other, places in exchange.sent(self.number).items():
            message = await self._message(f"{TAGS['backward']} {number}", other, work.step, work.microbatch)
            arrived[other] = message.payload.reshape(-1, exchange.channels, *places.size)
            if number == len(self._exchanges) - 1:  # from the worker that has computed the loss
                self._own[work.step, work.microbatch] = message.note.loss
        return exchange.output_slopes(self.number, errors, arrived)

    def _send_pieces(self, tag: str, pieces: Mapping[int, FlatArray], work: PipelinePass, loss: float) -> None:
        note = StageNote(work.step, work.microbatch, loss=loss)
        for other, piece in pieces.items():
            self._send(other, tag, frozen(piece).reshape(-1), note)
