"""Parts of split models in shards, in virtual time: the unsplit model, the bytes, and what each worker stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flockstep.arrays.schema import slices
from flockstep.errors import CompositionError, ConfigurationError, FlockstepError, ProtocolError
from flockstep.frameworks.base import Job
from flockstep.messages import PART
from flockstep.partitions.base import Partition
from flockstep.partitions.sharded import ShardedParts
from flockstep.planning.job_profile import task_of
from flockstep.planning.split_surrogate import split_shape
from flockstep.programs import GRADIENT
from flockstep.records.events import LostEvent, NodeEvent
from flockstep.runtime.plan import Batches
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.split import sharded_program
from flockstep.split.sharded_program import PartShard
from flockstep.split.shards import ShardedPartsModel
from flockstep.split.splitting import make_split
from flockstep.split.stages import MicroBatch
from flockstep.split.ways import TensorModel
from flockstep.workloads.base import Workload
from support import grid_jobs, images_job
from support.matrix import few
from support.split_jobs import BATCH, Ran, chain, check_trains_as_whole, job_of, simulated, tied

ITEMSIZE = 8
MOMENTUM = "sgd(lr=0.2, momentum=0.9)"
STAGES = [6 * 8 + 8 + 8 * 8 + 8, 8 * 7 + 7 + 7 * 5 + 5 + 5 + 1]
"""Numbers of parameters of the two stages of the chain that is cut at layer 4, behind 8 outputs."""
BOTH = "pipeline(2, 1f1b, 2) * tensor(2) * sharded(2)"


@pytest.mark.parametrize(
    ("partition", "strategy"),
    few(
        [
            (partition, strategy)
            for partition in ("pipeline(2, 1f1b, 2) * sharded(2)", "tensor(2) * sharded(2)", BOTH,
                              "pipeline(2, zb_h1, 2) * sharded(3)", "sharded(2) * pipeline(2, interleaved(2), 4)",
                              "pipeline(2, 1f1b, 2) * sharded(4, collective=rabenseifner)")
            for strategy in ("all_reduce", "local_sgd(period=2)", "ps(bsp, shards=2)")
        ],
        ("pipeline(2, 1f1b, 2) * sharded(2)", "ps(bsp, shards=2)"), ("tensor(2) * sharded(2)", "local_sgd(period=2)"),
        (BOTH, "all_reduce"), ("pipeline(2, 1f1b, 2) * sharded(4, collective=rabenseifner)", "all_reduce"),
    ),
)  # fmt: skip
def test_shards_of_parts_compute_the_unsplit_model(partition: str, strategy: str) -> None:
    """The oracle is the unsplit model in float64: parameters, losses and evaluations. The shards of 13 samples
    differ.
    """
    check_trains_as_whole(job_of(optimizer=MOMENTUM, batch=13), strategy, partition)


@pytest.mark.parametrize(
    ("job", "partition"),
    [
        (lambda: job_of(tied), "pipeline(2, 1f1b, 3) * sharded(2)"),
        (grid_jobs.job, "grid(2, 1) * sharded(2)"),
        (images_job.job, "tensor(2, convolutions=divided) * sharded(2)"),
    ],
)
def test_parts_that_share_parameters_or_samples_have_shards(job: Callable[[], Job], partition: str) -> None:
    """Tied weights, rectangles of images, and layers that are divided by samples within a shard's samples."""
    check_trains_as_whole(job(), "all_reduce", partition)


@pytest.mark.parametrize("schedule", few(["pipedream", "pipedream(True)", "ddg"], "pipedream"))
def test_versions_of_weights_are_those_of_the_whole_parts(schedule: str) -> None:
    """An asynchronous schedule delays the gathered parameters as it delays those of a stage without shards."""
    partition = f"pipeline(4, {schedule}, 1, (2, 4, 6))"
    whole, split = (simulated(job_of(), "all_reduce", one, steps=9) for one in (partition, partition + " * sharded(2)"))
    np.testing.assert_allclose(split.result, whole.result, rtol=0, atol=1e-13)
    assert np.abs(split.result - simulated(job_of(), "all_reduce", steps=9).result).max() > 1e-3


def test_gradients_that_are_not_reduced_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each worker keeps the gradient of its own samples."""

    async def kept(self: PartShard, share: float) -> None:
        self.gradient[:] = self._inner.gradient[self._spans[self._shard]]
        self.loss = self._inner.loss

    monkeypatch.setattr(PartShard, "_reduce", kept)
    assert apart_from_whole("pipeline(2, 1f1b, 2) * sharded(2)", batch=BATCH) > 1e-3


def test_shards_that_do_not_count_by_their_samples_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the mean of the shards' means is another gradient if their numbers of samples differ."""

    class Alike(MicroBatch):
        def divided(self, ways: int, partition: str) -> list[MicroBatch]:
            return [dataclasses.replace(one, share=1 / ways) for one in super().divided(ways, partition)]

    monkeypatch.setattr(sharded_program, "MicroBatch", Alike)
    assert apart_from_whole("tensor(2) * sharded(2)", batch=13) > 1e-4


def apart_from_whole(partition: str, batch: int) -> float:
    whole, split = (simulated(job_of(batch=batch), "all_reduce", one) for one in (None, partition))
    return float(np.abs(split.result - whole.result).max())


def sent(ran: Ran) -> list[int]:
    """Bytes that each worker has sent."""
    return [e.sent_bytes for e in sorted((e for e in ran.events if isinstance(e, NodeEvent)), key=lambda e: e.node)]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("ways", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_part_is_gathered_and_reduced_once_in_a_step(ways: int, microbatches: int) -> None:
    """For K parameters of a part and W shards: 2 (W - 1) K elements, one loss from each worker to each other, and the
    activations of all samples once in each direction, however many micro-batches there are.
    """
    steps, text = 4, f"pipeline(2, gpipe, {microbatches}, (4,)) * sharded({ways})"
    found = np.array(sent(simulated(job_of(), "all_reduce", text, replicas=1, steps=steps))).reshape(2, ways)
    each = [2 * (ways - 1) * size + ways * (ways - 1) + 8 * BATCH for size in STAGES]
    assert found.sum(1).tolist() == [steps * ITEMSIZE * one for one in each]
    most = np.abs(found / (steps * ITEMSIZE) - np.array(each)[:, None] / ways).max()
    assert most <= 2, "shards of one part differ by at most one element"


@pytest.mark.parametrize("pipeline", ["", "pipeline(2, 1f1b, 2) * "])
def test_ways_send_their_sums_once_and_their_copies_for_each_shard(pipeline: str) -> None:
    """The copies of layers that all ways compute travel among the workers of each shard, all else as without
    shards.
    """
    steps = 3
    plain, split = (
        simulated(job_of(), "all_reduce", f"{pipeline}tensor(2){more}", replicas=1, steps=steps)
        for more in ("", " * sharded(2)")
    )
    assert isinstance(split.simulation, SplitSimulation)
    model = split.simulation.model
    assert isinstance(model, ShardedPartsModel)
    assert isinstance(model.inner, TensorModel)
    copied = sum(part.copied(part.initial()).size for part in model.inner.parts)
    more = 2 * sum(model.inner.sizes) + 2 * len(model.inner.parts) + copied
    assert sum(sent(split)) == sum(sent(plain)) + steps * ITEMSIZE * more


def test_a_worker_stores_its_shard_of_its_part() -> None:
    """Parameters, gradient and momentum have 1/W of the elements of the part."""
    job, ways = job_of(optimizer=MOMENTUM), 3
    ran = simulated(job, "all_reduce", f"pipeline(2, 1f1b, 2, (4,)) * sharded({ways})", replicas=1, steps=1)
    assert isinstance(ran.simulation, SplitSimulation)
    stored = [group.runners[0].node.params.size for group in ran.simulation.groups]
    assert [sum(stored[:ways]), sum(stored[ways:])] == STAGES
    assert all(abs(one - STAGES[part // ways] / ways) < 1 for part, one in enumerate(stored))
    for part, size in enumerate(stored):
        assert ran.simulation.program(part, 0).gradient.size == size
        assert [one.size for one in ran.simulation.groups[part]._steppers[0].state.slots.values()] == [size]


def test_a_step_takes_its_share_of_the_time() -> None:
    """On links that take no time, a step of two shards takes half of the seconds of a step of the whole parts."""
    whole, split = (
        simulated(job_of(), "all_reduce", f"pipeline(2, gpipe, 3){more}", replicas=1) for more in ("", " * sharded(2)")
    )
    assert split.simulation.now == pytest.approx(whole.simulation.now / 2)


def test_dropout_draws_as_replicas_of_the_whole_parts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard w of replica r draws as replica 2 r + w of the pipeline alone, on the same samples."""

    def model() -> nn.Module:
        layers = list(chain())
        return nn.Sequential(*layers[:2], nn.Dropout(0.5), *layers[2:6], nn.Dropout(0.5), *layers[6:])

    job, pipeline = job_of(model), "pipeline(2, 1f1b, 3)"
    split = simulated(job, "all_reduce", f"{pipeline} * sharded(2)", replicas=1)
    assert isinstance(split.simulation, SplitSimulation)
    drawn = Batches(split.simulation.plan, 0)
    batches, turns = [drawn.next(GRADIENT) for _ in range(6)], dict[int, int]()

    def half(self: Batches, need: Any) -> np.ndarray:
        turns[id(self)] = turn = turns.get(id(self), -1) + 1
        found: np.ndarray = batches[turn][slices(BATCH, 2)[self._rank]]
        return found

    monkeypatch.setattr(Batches, "next", half)
    whole = simulated(job, "all_reduce", pipeline, replicas=2)
    np.testing.assert_allclose(split.result, whole.result, rtol=0, atol=1e-13)


def test_a_worker_that_dies_takes_its_replica_with_it() -> None:
    ran = simulated(
        job_of(), "ps(asynchronous)", "tensor(2) * sharded(2)", replicas=2, steps=8, faults=("dies(6, '8ms')",)
    )
    lost = {e.node: e.reason for e in ran.events if isinstance(e, LostEvent)}
    assert sorted(lost) == [4, 5, 6, 7]
    assert lost[4] == "worker 6 of the same replica died"
    steps = {e.node: e.steps for e in ran.events if isinstance(e, NodeEvent)}
    assert all(steps[node] == 8 for node in range(4))


def test_layers_that_a_grid_does_not_divide_are_told_with_shards_too() -> None:
    job = Workload.parse("digits(batch=8)").job(0)
    whole, shards = (make_split(job, 0, Partition.parse(text)) for text in ("grid(1, 2)", "grid(1, 2) * sharded(2)"))
    assert whole.note is not None
    assert shards.note == whole.note


@pytest.mark.parametrize("other", [1, 2])
def test_a_lost_message_ends_the_run(other: int) -> None:
    """Way 0 of shard 0 is part 0, its other shard part 1, and way 1 of shard 0 part 2."""

    def lose(simulation: SplitSimulation) -> None:
        simulation.program(0, 0).mailbox.missing[PART + other] = 3

    with pytest.raises(ProtocolError, match=r"message 3 from .* was lost, and later messages cannot be used"):
        simulated(job_of(), "all_reduce", "tensor(2) * sharded(2)", prepare=lose)


def normed(**options: Any) -> Callable[[], Job]:
    layers = nn.Linear(6, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)
    return lambda: job_of(lambda: nn.Sequential(*layers).double())


class Centered(nn.Module):
    """A layer of the user that subtracts the mean over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).sum()


@pytest.mark.parametrize(
    ("job", "partition", "reason"),
    [
        (
            normed(),
            "pipeline(2) * sharded(2)",
            r"every layer must .*, got BatchNorm1d in 1 of job 'chain'; use for exa",
        ),
        (normed(track_running_stats=False), "tensor(2) * sharded(2)", r"must compute .*, got BatchNorm1d in 1 of job"),
        (
            lambda: job_of(lambda: nn.Sequential(nn.Linear(6, 4), Centered(), nn.Linear(4, 1)).double()),
            "pipeline(2) * sharded(2)",
            r"must compute each sample on its own, got a loss of .* of job 'chain'",
        ),
        (
            lambda: job_of(batch=7),
            "pipeline(2, gpipe, 4) * sharded(2)",
            r"ways of sharded must be at most the 1 samples of a batch or micro-batch, got 2; use a larger",
        ),
        (
            lambda: job_of(batch=24),
            "pipeline(5) * sharded(8)",
            r"got none for shard 5 of stage 4 in job 'chain', whose parts have 56, 72, 63, 40, 6 parameters; use fewer",
        ),
        (
            lambda: dataclasses.replace(job_of(), loss=summed),
            "pipeline(2) * sharded(2)",
            r"must be the mean over the samples .* in 2 micro-batches, .*; use partition=none, or a",
        ),
    ],
)
def test_models_whose_parts_cannot_be_sharded_are_refused(job: Callable[[], Job], partition: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        simulated(job(), "all_reduce", partition)


@pytest.mark.parametrize(
    ("text", "refusal", "reason"),
    [
        ("sharded(2) * sharded(2)", CompositionError, r"can be combined with sharded\(ways=2\), got sharded\(ways=2\)"),
        ("sharded(2) * none", CompositionError, r"got none; use one of them, or sharded\(ways=2\) alone"),
        (f"{BOTH} * sharded(2)", CompositionError, r"pipeline \* tensor and grid can be combined .* got sharded_parts"),
        ("pipeline(2) * sharded(2) * tensor(2)", ConfigurationError, r"only a pipeline and a tensor can be multiplied"),
    ],
)
def test_products_that_do_not_exist_are_refused(text: str, refusal: type[FlockstepError], reason: str) -> None:
    with pytest.raises(refusal, match=reason):
        Partition.parse(text)


def test_what_is_said_of_a_part_is_said_of_its_shards() -> None:
    split, pipeline = (Partition.parse(f"pipeline(4, pipedream_2bw, 4){more}") for more in (" * sharded(2)", ""))
    assert isinstance(split, ShardedParts)
    assert (split.delays, split.remembers, split.mean_delay) == (pipeline.delays, pipeline.remembers, 1)
    assert split.splits_model
    assert [split.batches_held(part) for part in (0, 1, 6)] == [pipeline.batches_held(part) / 2 for part in (0, 0, 3)]
    assert split.copies(1) == 2 * pipeline.copies(0)


@pytest.mark.parametrize(
    ("job", "partition", "reason"),
    [
        (normed(), "pipeline(2) * sharded(2)", "every layer must compute each sample on its own, got BatchNorm1d in 1"),
        (
            job_of,
            "grid(1, 2) * sharded(2)",
            r"predicts pipeline, .* and each of them \* sharded, got grid.*; use one of",
        ),
    ],
)
def test_plans_refuse_what_runs_refuse_and_grids(job: Callable[[], Job], partition: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        split_shape(task_of("job", None, job()), Partition.parse(partition))
