"""A worker of this process that holds one part of a split model, in a real run."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from functools import partial

from flockstep.arrays.schema import FlatArray
from flockstep.links.bus import LAUNCHER
from flockstep.messages import PART, Message, Wanted
from flockstep.nodes import Worker
from flockstep.programs import GRADIENT, NeedGradient
from flockstep.records.failpoints import reach
from flockstep.runtime.member import Member
from flockstep.runtime.part_group import PartGroup
from flockstep.runtime.plan import Batches, LocalOptimizer, Plan
from flockstep.runtime.real import NodeConnection
from flockstep.split.parts import program_of
from flockstep.split.program import NeedRequest, PartRun, PartRunner, require_plain
from flockstep.split.stages import SplitModel


class HoldingConnection(NodeConnection):
    """The connection of a worker that holds one part of a replica, and computes the part's gradients with others."""

    def __init__(self, member: Member, worker: Worker, plan: Plan, split: SplitModel, group: PartGroup):
        super().__init__(member, worker, plan.strategy, plan.evaluate_every, group)
        self._plan, self._partition, self._part = plan, split.partition, group.part

    def train(self, stepper: LocalOptimizer) -> None:
        """Run the worker's program to its end, with the gradients of the part."""
        runner, node = self.runner, self.node
        answer: tuple[FlatArray | None, float | None] = None, None
        while runner.advance(*answer):
            need = runner.waiting
            assert isinstance(need, NeedGradient)
            require_plain(need, self._plan.strategy, self._partition)
            stepper.lr = self._plan.lr_at(node.run_step)
            answer = self._computed(need)
            reach("gradient.computed")

    @abstractmethod
    def _computed(self, need: NeedGradient) -> tuple[FlatArray, float]:
        """Compute the gradient of the part for the next batch, and return it and the loss."""


class PartConnection(HoldingConnection):
    """The connection of a worker that holds one part: to its group's workers, and to its replica's other parts."""

    def __init__(
        self,
        member: Member,
        worker: Worker,
        plan: Plan,
        split: SplitModel,
        group: PartGroup,
        batches: Batches,
        taken: int,
    ):
        """`taken`: number of steps that the worker has taken before, in a run that continues."""
        super().__init__(member, worker, plan, split, group)
        self._numbers: Counter[int] = Counter()
        """Number of messages sent to each other part."""
        batch = partial(batches.next, GRADIENT)
        run = PartRun(worker.rank, group.part, plan.steps, batch, self._send_to_part, plan.seed, taken)
        self._runner_of_part = PartRunner(program_of(split, run), lambda need: None, lambda gradient, loss: None)

    def take(self, message: Message) -> None:
        """Deliver a message, which may come from another part of the replica."""
        if not PART <= message.source < LAUNCHER:
            super().take(message)
            return
        self.flight.note("receive", message.source, message.tag, self.node.step, message.payload_bytes)
        self._runner_of_part.deliver(message)

    def _computed(self, need: NeedGradient) -> tuple[FlatArray, float]:
        part = self._runner_of_part
        part.request(self.node.params)
        while not isinstance(part.waiting, NeedRequest):
            if isinstance(part.waiting, Wanted):
                self.wait_once(part.waiting)  # an arrival continues the program, up to its next pass
            else:
                self.runner.lap("wait")
                part.passed()
                self.runner.lap("compute")
        self._wanted = None
        return part.part.gradient, part.part.loss

    def _send_to_part(self, to: int, message: Message) -> None:
        if to == self._part:
            self._runner_of_part.deliver(message)
            return
        self._numbers[to] += 1
        message.step, message.number = self.node.step, self._numbers[to]
        self.send(PART + to, message)
