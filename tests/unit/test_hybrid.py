"""Partition and strategy chosen together: predictions against runs of split models, memory by hand, and the choice."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
import re
import shlex
import statistics
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flockstep
import support.compiler  # noqa: F401
from flockstep.cli.app import run as command
from flockstep.costs import formulas
from flockstep.costs.layers import ModelShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import GPipe, OneForwardOneBackward
from flockstep.partitions.sharded import Sharded
from flockstep.partitions.tensor import TensorParallel
from flockstep.planning import hybrid
from flockstep.planning.advice import advise
from flockstep.planning.criteria import relative_samples
from flockstep.planning.hybrid import (
    SHORT,
    HybridAdvice,
    advise_hybrid,
    best_partitions,
    partitions,
    planned_by_pipedream,
)
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.plan import plan
from flockstep.planning.rehearsal import Rehearsal
from flockstep.planning.split_surrogate import JointShape, PipelineShape, SplitShape, split_shape
from flockstep.planning.step_prediction import StepPrediction, as_steady, held_bytes, predict_step, rehearsed
from flockstep.planning.surrogate import elements_in
from flockstep.records.events import StepEvent
from flockstep.runtime.plan import Plan
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.simulation.handling import Handled, Longer
from flockstep.split.joint import WayExchange
from flockstep.split.splitting import make_split
from flockstep.split.torch_stages import split_torch
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.split import Iid
from support.clusters import equal_machines
from support.images_job import images
from support.matrix import few
from support.split_jobs import job_of

WIDTHS = (64, 256, 256, 256, 10)
BATCH = 16
STRATEGIES = ("all_reduce", "local_sgd(period=4)", "ps(shards=2)")
KINDS = (Pipeline, TensorParallel, Sharded)


def wide() -> nn.Sequential:
    """A perceptron of 150,000 parameters, too many for a rehearsal to use the model itself."""
    torch.manual_seed(0)
    layers = [layer for a, b in itertools.pairwise(WIDTHS) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def wide_job() -> Job:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((256, 64), dtype=np.float32), random.integers(0, 10, 256)
    return Job(
        wide, lambda: Data(x, y, x[:8], y[:8]), "sgd(lr=0.01)", nn.functional.cross_entropy, batch=BATCH, name="wide"
    )


def site_of(
    job: Job, bandwidth: str = "1gbit", count: int = 4, compute: str = "constant(0.01)", more: str = ""
) -> Site:
    return Site(task_of("job", None, job), equal_machines(bandwidth, compute, count, more))


def predicted(strategy: str, partition: str, site: Site) -> StepPrediction:
    return predict_step(Strategy.parse(strategy), site, 4, partition=Partition.parse(partition))


def checked(job: Job, strategy: str, partition: str, site: Site, steps: int, rel: float = 0.01) -> StepPrediction:
    """The prediction, whose seconds and bytes of a step are compared with a run with real gradients, the first quarter
    left out.
    """
    split, chosen = make_split(job, 0, Partition.parse(partition)), Strategy.parse(strategy)
    workers = site.cluster.workers
    replicas = split.partition.replicas(workers)
    work = site.work(chosen, replicas)
    parts = Iid().assign(split.engine.labels, split.engine.train_size, replicas, 0)
    policy, cluster = choose_result(chosen, None), chosen.cluster(replicas)
    todo = Plan(chosen, cluster, split.engine.optimizer, parts, job.batch, steps, 0, policy, steps)
    network = Handled(site.cluster.network(workers), work.message, work.receive, work.serve)
    events: list[StepEvent] = []
    simulation = SplitSimulation(
        split, todo, Longer(site.compute(workers), work.step), network,
        lambda event: events.append(event) if isinstance(event, StepEvent) else None,
    )  # fmt: skip
    simulation.run()
    kept = [one for one in events if one.step > steps // 4]
    took = statistics.fmean(one.compute_seconds + one.wait_seconds + one.comm_seconds for one in kept)
    found = predicted(strategy, partition, site)
    assert found.seconds == pytest.approx(took, rel=rel)
    assert found.sent_bytes == pytest.approx(statistics.fmean(one.sent_bytes for one in kept), rel=rel)
    return found


@pytest.mark.parametrize("partition", few(
    [
        "pipeline(2, gpipe, 4)", "pipeline(4, 1f1b, 3)", "pipeline(2, interleaved(2), 4)", "pipeline(2, zb_h1, 2)",
        "tensor(2)", "sharded(2)", "sharded(4)",
    ],
    "pipeline(4, 1f1b, 3)", "pipeline(2, interleaved(2), 4)", "tensor(2)", "sharded(2)",
))  # fmt: skip
@pytest.mark.parametrize("strategy", few(STRATEGIES, "local_sgd(period=4)"))
def test_a_small_model_is_rehearsed_as_it_runs(strategy: str, partition: str) -> None:
    """Of a small model the rehearsal is the run: the same seconds and bytes, on a slow link and with uneven times."""
    job = job_of(batch=12)
    checked(job, strategy, partition, site_of(job, "10mbit"), 48)


@pytest.mark.parametrize(
    ("strategy", "partition"),
    [
        ("all_reduce", "tensor(2, convolutions=divided)"),
        pytest.param("local_sgd(period=4)", "tensor(4, convolutions=divided)", marks=pytest.mark.full),
    ],
)
def test_divided_convolutions_are_rehearsed_as_they_run(strategy: str, partition: str) -> None:
    """Control: if every way computes the convolutions, a step takes at least a tenth longer."""
    job, whole = images(), partition.replace(", convolutions=divided", "")
    site = site_of(job, "100mbit")
    found, other = checked(job, strategy, partition, site, 16), predicted(strategy, whole, site)
    assert found.memory < other.memory
    assert found.seconds * 1.1 < other.seconds


@pytest.mark.parametrize(("job", "divided"), [(job_of(), []), (images(), [2, 4])])
def test_a_search_divides_the_convolutions_of_models_that_have_any(job: Job, divided: list[int]) -> None:
    found = [one for options in partitions(site_of(job), 4) for one in options]
    ways = [one.ways for one in found if isinstance(one, TensorParallel) and one.convolutions == "divided"]
    assert ways == divided


@pytest.mark.parametrize(
    "partition",
    [
        "pipeline(2, 1f1b, 4)",
        "tensor(2)",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("pipeline(4, gpipe, 2)", "sharded(4)", "tensor(4)")),
    ],
)
@pytest.mark.parametrize("strategy", few(STRATEGIES, "all_reduce"))
def test_a_surrogate_stands_for_a_larger_model(strategy: str, partition: str) -> None:
    job = wide_job()
    checked(job, strategy, partition, site_of(job, "200mbit"), 16, rel=0.05)


def split_rehearsal(strategy: str, site: Site, shape: SplitShape) -> Rehearsal:
    return rehearsed(Strategy.parse(strategy), site, 4, split=shape)


@pytest.mark.parametrize("partition", ["tensor", pytest.param("sharded", marks=pytest.mark.full)])
def test_a_single_replica_exchanges_nothing(partition: str) -> None:
    """With two replicas, a ring of two workers per part sends each element of the gradient once."""
    site = site_of(job_of(batch=12))
    alone = split_rehearsal("all_reduce", site, split_shape(site.task, Partition.parse(f"{partition}(4)")))
    assert alone.bytes_between_parts == pytest.approx(alone.sent_bytes_per_step)
    shape = split_shape(site.task, Partition.parse(f"{partition}(2)"))
    found = split_rehearsal("all_reduce", site, shape)
    between = 2 * (found.sent_bytes_per_step - found.bytes_between_parts)
    assert between == pytest.approx(site.task.itemsize * elements_in(shape.tensors), rel=0.01)


def test_activations_of_another_size_are_noticed() -> None:
    """Negative control: with half of the outputs the same rehearsal sends too little."""
    job = wide_job()
    site = site_of(job)
    shape = split_shape(site.task, Pipeline.parse("pipeline(2, gpipe, 1)"))
    assert isinstance(shape, PipelineShape)
    less = dataclasses.replace(shape.chunks[0], sends=shape.chunks[0].sends / 2)
    thin = dataclasses.replace(shape, chunks=(less, *shape.chunks[1:]))
    found = [2 * split_rehearsal("all_reduce", site, one).bytes_between_parts for one in (shape, thin)]
    assert found == pytest.approx([2 * BATCH * 256 * 4, BATCH * 256 * 4], rel=0.01)


@pytest.mark.parametrize(
    "partition", ["pipeline(2, gpipe, 2)", "pipeline(2, interleaved(2), 2)", "pipeline(3, 1f1b, 1, (2, 6))"]
)
def test_the_cut_and_the_shares_are_those_of_the_run(partition: str) -> None:
    job, pipeline = wide_job(), Pipeline.parse(partition)
    split, shape = split_torch(job, 0, pipeline), split_shape(task_of("job", None, job), pipeline)
    assert [sum(elements_in(chunk.tensors) for chunk in part) for part in shape.parts] == list(split.sizes)
    for part, chunks in zip(split.parts, shape.parts, strict=True):
        for mine, planned in zip(part.shares, chunks, strict=True):
            assert dataclasses.astuple(planned.shares) == pytest.approx(dataclasses.astuple(mine))
    shapes = [entry.shape for part in split.parts for entry in part.schema.entries]
    assert list(shape.tensors) == shapes


def test_exchanges_of_another_size_are_noticed() -> None:
    """Negative control: with half of each array the same rehearsal sends too little."""
    job = wide_job()
    site = site_of(job, "200mbit")
    shape = split_shape(site.task, Partition.parse("tensor(2)"))
    assert isinstance(shape, JointShape)
    half = [dataclasses.replace(one, nbytes=one.nbytes / 2) for one in exchanges(shape)]
    thin = dataclasses.replace(shape, timeline=dataclasses.replace(shape.timeline, work=(0.5, *half)))
    found, less = (split_rehearsal("all_reduce", site, one) for one in (shape, thin))
    assert found.bytes_between_parts == pytest.approx(sum(one.sent(2) for one in exchanges(shape)), rel=0.02)
    assert less.bytes_between_parts == pytest.approx(found.bytes_between_parts / 2, rel=0.02)


def exchanges(shape: JointShape) -> list[WayExchange]:
    return [one for one in shape.timeline.work if isinstance(one, WayExchange)]


def test_memory_of_ways_and_shards_by_hand() -> None:
    """A perceptron of 64, 256, 256, 256 and 10 units in two pairs of layers, SGD without momentum."""
    task = task_of("job", None, wide_job())
    pairs = [(64, 256, 256), (256, 256, 10)]
    halves = sum((before * inner + inner + inner * after) // 2 for before, inner, after in pairs)
    shared = 256 + 10  # the biases of the layers that are split by their inputs: each way trains a half, both have all
    shape = split_shape(task, Partition.parse("tensor(2)"))
    assert isinstance(shape, JointShape)
    assert [sum(map(math.prod, part)) for part in shape.held] == [halves + shared // 2] * 2
    assert held_bytes(task, shape) == 4 * (3 * (halves + shared // 2) + 3 * shared) + shape.timeline.saved_bytes
    layers = [64 * 256 + 256, 256 * 256 + 256, 256 * 256 + 256, 256 * 10 + 10]
    sharded = split_shape(task, Partition.parse("sharded(2)"))
    assert isinstance(sharded, JointShape)
    stored = 3 * math.ceil(sum(layers) / 2) + 3 * max(layers)
    assert held_bytes(task, sharded) == 4 * stored + sharded.timeline.saved_bytes
    inputs = BATCH // 2 * (64 + 3 * 256)
    assert sharded.timeline.saved_bytes == pytest.approx(4 * inputs, rel=0.06), "and a few numbers of the loss"


def two_layers() -> JobProfile:
    """Two fully connected layers of 100 × 50 and 50 × 20, with biases, for 8 samples; an optimizer with momentum."""
    layers = formulas.linear("a", 100, 50, data=True), formulas.linear("b", 50, 20)
    model = ModelShape("two", layers)
    return JobProfile("two", model.gradients, tuple((one.gradients,) for one in layers), batch=8, slots=1, shape=model)


@pytest.mark.parametrize(
    ("partition", "held", "copies"),
    [
        ("pipeline(2, gpipe, 4)", 8, 1),  # all four micro-batches of 2 samples
        ("pipeline(2, 1f1b, 4)", 4, 1),  # K - s = 2 micro-batches on the first stage
        ("pipeline(2, zb_h1, 4)", 4, 1),
        ("pipeline(2, pipedream, 1)", 16, 2),  # two batches in flight, and the weights of both
    ],
)
def test_memory_by_hand(partition: str, held: int, copies: int) -> None:
    """The first stage needs the most: 5,050 parameters with gradient, momentum and copies, and 50 outputs a sample."""
    task = two_layers()
    parameters = 4 * 5050 * (1 + 1 + 1 + copies)
    assert held_bytes(task, split_shape(task, Pipeline.parse(partition))) == parameters + 4 * 50 * held


def test_memory_of_a_whole_replica_counts_activations() -> None:
    job = wide_job()
    site = site_of(job)
    found = plan(site.task, site.cluster, strategies=("all_reduce",))
    assert found.alone.memory == site.task.nbytes * (2 + site.task.slots) + BATCH * 4 * (6 * 256 + 10)


@lru_cache
def advised(
    bandwidth: str, more: str = "", asked: tuple[str, ...] = (), compute: str = "constant(0.01)"
) -> HybridAdvice:
    site = site_of(wide_job(), bandwidth, more=more, compute=compute)
    outlook = plan(site.task, site.cluster, strategies=STRATEGIES)
    return advise_hybrid(advise(outlook), tuple(map(Partition.parse, asked)))


def test_where_messages_take_as_long_as_gradients_the_model_is_not_split() -> None:
    """Every sum of the ways, and every micro-batch, takes at least the latency of 50 us."""
    found = advised("100gbit", compute="constant(0.0002)")
    assert found.choice is not None
    assert str(found.choice.partition) == "none"
    assert "Do not split the model" in found.sentences[0]
    assert found.splits, "splits were predicted, and lose"


def test_what_does_not_fit_is_split() -> None:
    found = advised("100gbit", 'memory = "1200kB"')
    assert found.choice is not None
    assert found.choice.split
    assert found.choice.memory <= 1.2e6
    assert re.match("Split (the model|each replica) over", found.sentences[0])
    assert (
        "No strategy with whole replicas meets the requirements: a whole replica needs at least" in found.sentences[1]
    )


def test_all_partitions_are_searched() -> None:
    """Where a step takes long and links are fast, workers that share each layer waste no time on bubbles."""
    site = site_of(wide_job(), "100gbit", compute="constant(0.5)")
    found = {kind: [str(one) for each in partitions(site, 4) for one in each if type(one) is kind] for kind in KINDS}
    assert found[TensorParallel] == [str(TensorParallel(ways)) for ways in (2, 4)]
    assert found[Sharded] == [str(Sharded(ways)) for ways in (2, 4)]
    advice = advised("100gbit", 'memory = "1200kB"')
    assert {type(one.partition) for one in advice.splits} & {TensorParallel, Sharded}


@pytest.mark.parametrize(
    ("bandwidth", "compute", "preferred"), [("200mbit", "constant(0.006)", True), ("100gbit", "constant(0.5)", False)]
)
def test_gpipe_is_preferred_where_messages_take_long(bandwidth: str, compute: str, preferred: bool) -> None:
    """A stage of 1F1B waits for its neighbors between two passes, so that it is faster with fewer micro-batches. Where
    passes take long, 1F1B is as fast as GPipe and holds fewer activations.
    """
    site, strategy = site_of(wide_job(), bandwidth, compute=compute), Strategy.parse("all_reduce")
    found = [one.partition for one in best_partitions(site, 4, strategy, [])]
    (pipeline,) = [one for one in found if isinstance(one, Pipeline) and one.stages == 4]
    assert isinstance(pipeline.schedule, GPipe) == preferred
    tried = [Pipeline(4, schedule, count) for schedule in (GPipe(), OneForwardOneBackward()) for count in (4, 8, 16)]
    law = as_steady(site.compute(4))
    seconds = [predict_step(strategy, site, 4, SHORT, partition=one, law=law).seconds for one in (pipeline, *tried)]
    assert seconds[0] <= 1.01 * min(seconds)
    assert (min(seconds[1:4]) < 0.9 * min(seconds[4:])) == preferred


def test_partitions_that_a_run_refuses_are_refused_in_the_search() -> None:
    """A model whose only pair of layers is around a residual connection has stages and shards, but no ways."""
    site = site_of(dataclasses.replace(wide_job(), model=Wrapped), "100gbit")
    outlook = plan(site.task, site.cluster, strategies=("all_reduce",))
    found = advise_hybrid(advise(outlook))
    refused = [(name, why) for name, why in found.refused if "tensor" in name]
    assert [name for name, _ in refused] == [str(TensorParallel(2)), str(TensorParallel(4))], "once for each reason"
    assert "no layer of the model of job 'wide' can be split over 2 ways, got" in refused[0][1]
    assert found.splits


def test_a_number_of_micro_batches_that_is_refused_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def predict(*rest: Any, partition: Partition, **law: Any) -> StepPrediction:
        if not isinstance(partition, Pipeline) or partition.microbatches > 1:
            raise ConfigurationError(f"{partition} is refused")
        return predict_step(*rest, partition=partition, **law)

    monkeypatch.setattr(hybrid, "predict_step", predict)
    site = site_of(wide_job(), "100gbit")
    outlook = plan(site.task, site.cluster, strategies=("all_reduce",))
    found = advise_hybrid(advise(outlook))
    assert {getattr(one.partition, "microbatches", None) for one in found.splits} == {1}
    assert any(str(Partition.parse("pipeline(4, 1f1b, 4)")) == name for name, _ in found.refused)


class Wrapped(nn.Module):
    """A model that is traced to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.cumsum(self.last(x + self.inner(x)), 1)


def test_what_fits_nowhere_is_said() -> None:
    found = advised("100gbit", 'memory = "100kB"')
    assert found.choice is None
    assert "Neither whole nor split replicas fit into the 100 kB of a worker" in found.sentences[0]


def test_where_activations_are_smaller_than_weights_a_slow_network_splits() -> None:
    """2 × 16 samples × 256 floats cross the cut, 600 kB of gradients would cross every link."""
    found = advised("100mbit", "", ("pipeline(2, 1f1b, 2)", "pipeline(4, 1f1b, 4)"), "constant(0.02)")
    best = found.splits[0]
    assert found.choice is best
    assert best.split
    assert f" with {best.partition}" in found.sentences[0]
    assert "times as fast as the best strategy with whole replicas" in found.sentences[1]
    assert found.speedup(best) > 1


def test_a_schedule_with_delays_needs_more_samples() -> None:
    site = site_of(wide_job())
    late, now = (predicted("all_reduce", f"pipeline(4, {one}, 1)", site) for one in ("pipedream", "1f1b"))
    assert late.samples_per_second > 2 * now.samples_per_second
    assert relative_samples(late, site) > relative_samples(now, site)


def test_pipedreams_plan_names_the_layers_of_its_cut() -> None:
    site = site_of(wide_job(), "10mbit", compute="constant(0.1)")
    pipeline = planned_by_pipedream(site, 4)
    assert pipeline is not None
    assert pipeline.stages == 4
    split_torch(wide_job(), 0, pipeline)  # can be cut there
    assert planned_by_pipedream(site_of(wide_job(), "100gbit"), 4) is None, "replicas only, on a fast network"


def test_models_that_cannot_be_cut_say_why() -> None:
    softmax = flockstep.plan("softmax", "laptop", strategies=["all_reduce"], hybrid=True).hybrid
    assert softmax is not None
    (sentence,) = softmax.sentences
    assert "Do not split the model: a model that is split must be a torch.nn.Module, got Softmax" in sentence
    branches = flockstep.plan("googlenet", "laptop", strategies=["all_reduce"], hybrid=True).hybrid
    assert branches is not None
    assert "googlenet has branches" in branches.sentences[0]


def test_the_command_chooses_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "vgg-a", "-c", "lab-1gbit", "-n", "4", "-s", "all_reduce", "--memory", "2.5GB"]
    assert command([*words, "--partition", "pipeline(4, 1f1b, 8)", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["hybrid"]
    assert [one["partition"] for one in found["splits"]] == [str(Pipeline.parse("pipeline(4, 1f1b, 8)"))]
    assert found["splits"][0]["layers"][0] == "conv1_1"
    assert command([*words, "--partition", "pipeline(4, 1f1b, 8)"]) == 0
    said = capsys.readouterr().out
    assert said.count("Split the model over all 4 workers with") + said.count("Do not split the model") == 1
    assert "flockstep train JOB -s all_reduce" in said
    assert command([*words, "--partition", "none"]) == 2
    assert "a plan of split models predicts partitions that split the model, got none" in capsys.readouterr().err
    assert command([*words, "--partition", "pipeline(3)"]) == 2
    assert (
        "must be a multiple of 3 for pipeline(stages=3, schedule=1f1b, microbatches=1), got 4; use"
        in capsys.readouterr().err
    )
    assert command([*words, "--partition", "grid(2, 2)"]) == 2
    assert "a plan of split models predicts pipeline, tensor and sharded, got" in capsys.readouterr().err
    assert command([*words[:-1], "1"]) == 2
    assert "memory must be > 0 bytes, with a unit" in capsys.readouterr().err


def split_job_file(tmp_path: Path) -> Path:
    file = tmp_path / "wide.py"
    file.write_text("from test_hybrid import wide_job as job\n")
    return file


def test_one_recommendation_and_one_command_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a worker is too small for a whole replica: the plan names one split, and the command trains it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    file = split_job_file(tmp_path)
    words = ["plan", str(file), "-c", "lab-1gbit", "-n", "4", "-s", "all_reduce", "--memory", "1200kB", "-b", "8"]
    assert command([*words, "--hybrid", "--out", str(tmp_path / "plan.html")]) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.split("\n") if line.startswith("  flockstep train")]
    assert "Split the model over all 4 workers" in said
    assert "there is one replica, so nothing is exchanged between replicas" in " ".join(said.split())
    assert "Use one worker" not in said
    assert "No strategy meets" not in said
    train = shlex.split(line)[1:]
    assert train[-4:] == ["-n", "4", "--batch", "8"]
    assert line.strip() in html.unescape((tmp_path / "plan.html").read_text("utf-8"))
    assert command(["simulate", *train[1:], "--steps", "3", "--out", str(tmp_path / "run")]) == 0


def test_a_model_that_is_not_split_has_one_recommendation_and_one_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["plan", "softmax", "-s", "all_reduce", "--hybrid"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("must be a torch.nn.Module, got SoftmaxRegression") == 1
    assert said.count("flockstep train") == 1
    assert "Do not split the model" in said


def test_shapes_that_cannot_be_split_are_refused() -> None:
    for text in ("tensor(2)", "sharded(2)"):
        with pytest.raises(ConfigurationError, match="is known only for a job; plan for a job, or use a pipeline"):
            split_shape(two_layers(), Partition.parse(text))
    with pytest.raises(ConfigurationError, match="layers of x are unknown"):
        split_shape(JobProfile("x", 10), Pipeline.parse("pipeline(2, gpipe, 1)"))
    with pytest.raises(ConfigurationError, match="microbatches must be at most the 8 samples"):
        split_shape(two_layers(), Pipeline.parse("pipeline(2, gpipe, 9)"))
