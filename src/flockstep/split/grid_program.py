"""The program of one worker of a grid (Coates et al. 2013): passes over the worker's rectangles, and exchanges of the
activations and gradients that cross a border.
"""

from __future__ import annotations

from typing import Literal

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
                given = await self._exchange("forward", chunk - 1, work, given)
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
                errors = await self._exchange("backward", chunk - 1, work, errors)
        return None

    async def _exchange(
        self, kind: Literal["forward", "backward"], number: int, work: PipelinePass, array: FlatArray | None
    ) -> FlatArray | None:
        """Forward: send the outputs that other workers read, and return this worker's inputs. Backward: send the
        gradients of inputs back to the workers that hold them, and return the gradient of the outputs.
        """
        exchange, step, micro, forward = self._exchanges[number], work.step, work.microbatch, kind == "forward"
        note = StageNote(step, micro, loss=0.0 if forward else self._own[step, micro])
        pieces = exchange.pieces(self.number, array) if forward else exchange.slopes(self.number, array)
        for other, piece in pieces.items():
            self._send(other, f"{TAGS[kind]} {number}", frozen(piece).reshape(-1), note)
        arrived: dict[int, FlatArray] = {}
        for other, places in (exchange.fetched if forward else exchange.sent)(self.number).items():
            message = await self._message(f"{TAGS[kind]} {number}", other, step, micro)
            arrived[other] = message.payload.reshape(-1, exchange.channels, *places.size)
            if not forward and number == len(self._exchanges) - 1:  # from the worker that has computed the loss
                self._own[step, micro] = message.note.loss
        return (exchange.inputs if forward else exchange.output_slopes)(self.number, array, arrived)
