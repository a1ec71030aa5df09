"""Weights that several stages, or several sharded layers, compute with: the gradients of all uses count, once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import support.compiler  # noqa: F401
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.partitions.base import Partition
from flockstep.records.events import NodeEvent
from flockstep.split.splitting import make_split
from flockstep.split.stage_program import PipelineStage
from flockstep.split.stages import PipelineModel
from support.split_jobs import check_trains_as_whole, job_of, simulated, tied
from support.tied_job import WIDTH, WORDS, job, model

FULL = pytest.mark.full
ITEMSIZE = 8
CHAIN = "pipeline(2, gpipe, 2, split_at=('4',))"
INTERLEAVED = "pipeline(2, interleaved(2), 4)"
"""Layers are chunks 0 to 3 in turn on stages 0 and 1: the embedding on stage 0, its second use on stage 1."""


def chained() -> Job:
    """The second and the third layer share weights, and have a bias each."""
    return job_of(tied, optimizer="sgd(lr=0.2, momentum=0.9)")


@pytest.mark.parametrize(
    ("made", "strategy", "partition"),
    [
        (job, "ps(bsp, shards=2)", "pipeline(3, 1f1b, 3)"),
        (job, "all_reduce", INTERLEAVED),
        (chained, "local_sgd(period=2)", CHAIN),
        (job, "local_sgd(period=2)", "sharded(3)"),
        *(
            pytest.param(job, strategy, partition, marks=FULL)
            for strategy in ("all_reduce", "local_sgd(period=2)", "ps(bsp, shards=2)", "easgd(period=2, alpha=0.3)")
            for partition in ("pipeline(4, gpipe, 2)", "pipeline(2, zb_h1, 4)", INTERLEAVED, "sharded(2)")
        ),
    ],
)
def test_tied_weights_train_as_in_the_unsplit_model(made: Callable[[], Job], strategy: str, partition: str) -> None:
    check_trains_as_whole(made(), strategy, partition)


def test_a_use_whose_gradient_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the owner trains with the gradient of its own use only, which is noticed before the run."""
    end = PipelineStage._end_step

    async def ended(self: PipelineStage, step: int) -> None:
        for _, tie in self._borrows:
            self._slope[tie.borrowed] = 0
        await end(self, step)

    monkeypatch.setattr(PipelineStage, "_end_step", ended)
    with pytest.raises(ConfigurationError, match="must compute what the model computes, got a loss of"):
        simulated(job(), "all_reduce", "pipeline(2, 1f1b, 2)")


def test_tied_weights_travel_twice_in_a_step() -> None:
    """The owner sends the embedding at the begin of a step, and gets the gradient of the other use at the end."""
    sent, steps = [], 3
    for tie in (True, False):
        built = dataclasses.replace(job(), model=lambda tie=tie: model(tied=tie))
        ran = simulated(built, "all_reduce", "pipeline(2, 1f1b, 2)", replicas=1, steps=steps)
        sent.append([e.sent_bytes for e in sorted(ran.events, key=str) if isinstance(e, NodeEvent)])
    assert [one - other for one, other in zip(*sent, strict=True)] == [steps * ITEMSIZE * WORDS * WIDTH] * 2


@pytest.mark.parametrize("partition", ["pipeline(3, 1f1b, 3)", INTERLEAVED])
def test_a_tied_parameter_has_one_owner(partition: str) -> None:
    split = make_split(job(), 0, Partition.parse(partition))
    assert isinstance(split, PipelineModel)
    (tie,) = split.ties
    assert tie.lent.stop - tie.lent.start == tie.borrowed.stop - tie.borrowed.start == WORDS * WIDTH
    assert sum(split.sizes) == sum(one.numel() for one in model().parameters())
    assert len({entry.name for part in split.parts for entry in part.schema.entries}) == sum(
        len(part.schema.entries) for part in split.parts
    )


def test_asynchronous_schedules_keep_tied_weights_together() -> None:
    """A stage of PipeDream goes on before the owner has all gradients of a step."""
    with pytest.raises(ConfigurationError, match=r"at most 1 chunks, .* because embedding and embedding#2 share weigh"):
        make_split(job(), 0, Partition.parse("pipeline(2, pipedream)"))
