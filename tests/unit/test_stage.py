"""The program of a stage without virtual time: messages as bytes, each pass at once."""

from __future__ import annotations

from collections import deque
from functools import partial

import numpy as np
import pytest

import support.compiler  # noqa: F401
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, ProtocolError, RunError
from flockstep.frameworks.torch import TorchEngine
from flockstep.links import wire
from flockstep.messages import PART, Mailbox, Message
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.split.parts import program_of
from flockstep.split.program import NeedPass, NeedRequest, PartRun, PartRunner, Ways
from flockstep.split.splitting import make_split
from flockstep.split.stage_program import PipelineStage, stage_notes
from flockstep.split.torch_stages import split_torch
from support.split_jobs import job_of

LR, STEPS = 0.2, 3


class OverTheWire:
    """Stages of one replica, each with an optimizer of its own, that exchange messages as bytes in any order between
    pairs.
    """

    def __init__(self, partition: str, lose: int = 0) -> None:
        """`lose`: number of the message that is lost; 0 for none."""
        self.pipeline = Pipeline.parse(partition)
        self.split = split_torch(job_of(), 0, self.pipeline)
        self.params = [part.initial() for part in self.split.parts]
        self.losses: list[list[float]] = [[] for _ in self.split.parts]
        self.sent = 0
        self._lose = lose
        self._ways: dict[tuple[int, int], deque[tuple[bytes, bytes]]] = {}
        notes = stage_notes(self.pipeline.schedule.chunks)
        self._identity = partial(wire.SenderIdentity, "run", schema="chain", model_bytes=1 << 20, notes=notes)
        self.runners = [self._runner(number) for number in range(self.pipeline.stages)]

    def _runner(self, number: int) -> PartRunner:
        batches = iter([np.arange(12) + 12 * step for step in range(STEPS)])
        run = PartRun(0, number, STEPS, batches.__next__, partial(self._send, number), name=f"stage {number}")
        stage = PipelineStage(run, self.split.parts[number], self.pipeline)
        return PartRunner(stage, lambda need: None, partial(self._step, number))

    def _send(self, source: int, to: int, message: Message) -> None:
        self.sent += 1
        if self.sent != self._lose:
            payload = b"" if message.array is None else message.array.tobytes()
            header = wire.encode(message, self._identity(address=PART + source))
            self._ways.setdefault((source, to), deque()).append((header, payload))

    def _step(self, number: int, gradient: FlatArray, loss: float) -> None:
        self.params[number] -= LR * gradient
        self.losses[number].append(loss)

    def run(self) -> None:
        """Go on until nothing moves."""
        moved = True
        while moved:
            moved = False
            for (source, to), way in self._ways.items():
                if way:
                    header, payload = way.popleft()
                    sender, memory = PART + source, memoryview(payload) if payload else None
                    me = self._identity(address=PART + to, heard={sender: -1})
                    self.runners[to].deliver(wire.decode(header, memory, sender, me))
                    moved = True
            for number, runner in enumerate(self.runners):
                if isinstance(runner.waiting, NeedPass):
                    runner.passed()
                    moved = True
                elif isinstance(runner.waiting, NeedRequest) and len(self.losses[number]) < STEPS:
                    runner.request(self.params[number])
                    moved = True


@pytest.mark.parametrize("partition", ["pipeline(4, 1f1b, 6)", "pipeline(2, interleaved, 4)", "pipeline(3, zb_h1, 5)"])
def test_messages_as_bytes_train_the_unsplit_model(partition: str) -> None:
    ran = OverTheWire(partition)
    ran.run()
    whole = TorchEngine(job_of(), 0)
    params, losses = whole.initial(), []
    for step in range(STEPS):
        out = np.empty_like(params)
        losses.append(whole.gradient(params, np.arange(12) + 12 * step, out))
        params = params - LR * out
    found = ran.split.engine.in_order(np.concatenate(ran.params))  # type: ignore[attr-defined]
    np.testing.assert_allclose(found, params, rtol=0, atol=1e-13)
    for each in ran.losses:
        np.testing.assert_allclose(each, losses, rtol=1e-12)


def test_ddg_waits_for_the_batch_before() -> None:
    ran = OverTheWire("pipeline(3, ddg, 1)")
    ran.run()
    assert [len(each) for each in ran.losses] == [STEPS] * 3
    assert ran.sent == STEPS * (2 + 2 + 1), (
        "activations, their gradients, and one message for each batch that has passed"
    )


def test_a_lost_message_is_noticed() -> None:
    """The activations of the third micro-batch arrive where those of the second are expected."""
    with pytest.raises(
        ProtocolError, match=r"stage 1 expected 'activations 0' of micro-batch 1 of step 0, got .* 2 of"
    ):
        OverTheWire("pipeline(2, gpipe, 6)", lose=2).run()


def test_no_step_beyond_the_last() -> None:
    ran = OverTheWire("pipeline(2, 1f1b, 2)")
    ran.run()
    with pytest.raises(RunError, match="stage 0 has no further step"):
        ran.runners[0].request(ran.params[0])


@pytest.mark.parametrize(
    ("partition", "names"),
    [
        ("pipeline(2, 1f1b, 2)", ["stage 0", "stage 1"]),
        ("tensor(2)", ["way 0", "way 1"]),
        ("sharded(2)", ["shard 0", "shard 1"]),
    ],
)
def test_parts_have_the_noun_of_their_partition(partition: str, names: list[str]) -> None:
    parsed = Partition.parse(partition)
    assert [parsed.part_name(part) for part in range(parsed.parts)] == names
    split = make_split(job_of(batch=12), 0, parsed)
    program = program_of(split, PartRun(0, parsed.parts - 1, 1, lambda: np.arange(12), lambda to, message: None))
    runner = PartRunner(program, lambda need: None, lambda gradient, loss: None)
    runner.close()
    with pytest.raises(RunError, match=f"^{names[-1]} has no further step"):
        runner.request(split.parts[-1].initial())


def test_a_lost_message_between_ways_names_the_part_that_sent_it() -> None:
    """Part 0 of the third replica is worker 4, not worker 0."""
    run = PartRun(2, 1, STEPS, lambda: np.arange(12), lambda to, message: None)
    mailbox = Mailbox()
    mailbox.put(Message(PART, "reduce", np.zeros(4), number=2))
    with pytest.raises(ProtocolError, match="message 1 from part 0 was lost"):
        Ways(2, run, mailbox).require_all(0)


def test_more_micro_batches_than_samples() -> None:
    with pytest.raises(ConfigurationError, match="at most the 12 samples of a batch, got 13"):
        OverTheWire("pipeline(2, 1f1b, 13)").run()
