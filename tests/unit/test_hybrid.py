"""Partition and strategy chosen together: predictions against runs of split models, memory by hand, and the choice."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import nn

import flockstep
from flockstep.cli.app import run as command
from flockstep.costs import formulas
from flockstep.costs.cluster_reading import read_cluster
from flockstep.costs.layers import ModelShape
from flockstep.drivers.plan import Plan
from flockstep.drivers.virtual_split import SplitSimulation
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.torch_stages import split_torch
from flockstep.partitions.pipeline import Pipeline
from flockstep.planning.advice import advise
from flockstep.planning.hybrid import (
    HybridAdvice,
    SplitPrediction,
    advise_hybrid,
    memory_of,
    planned_by_pipedream,
    predict_split,
)
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.plan import plan
from flockstep.planning.split_surrogate import split_shape
from flockstep.records.events import StepEvent
from flockstep.simulation.handling import Handled, Longer
from flockstep.strategies.base import Strategy, choose_result
from flockstep.workloads.split import Iid
from support.matrix import few
from support.split_jobs import job_of

WIDTHS = (64, 256, 256, 256, 10)
BATCH = 16
STRATEGIES = ("all_reduce", "local_sgd(period=4)", "ps(shards=2)")


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
    text = f'compute = "{compute}"\n[nodes.machines]\ncount = {count}\n{more}\n[[links]]\ninside = "machines"\n'
    shape = read_cluster(text + f'bandwidth = "{bandwidth}"\nlatency = "50us"\n', name="test")
    return Site(task_of("job", None, job), shape)


def measured(job: Job, strategy: str, partition: str, site: Site, steps: int) -> tuple[float, float]:
    """Seconds and bytes of a worker's step in a run with real gradients, the first quarter left out."""
    split, chosen = split_torch(job, 0, Pipeline.parse(partition)), Strategy.parse(strategy)
    pipeline = Pipeline.parse(partition)
    workers = site.cluster.workers
    replicas = pipeline.replicas(workers)
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
    return took, statistics.fmean(one.sent_bytes for one in kept)


@pytest.mark.parametrize("partition", few(
    ["pipeline(2, gpipe, 4)", "pipeline(4, 1f1b, 3)", "pipeline(2, interleaved(2), 4)", "pipeline(2, zb_h1, 2)"],
    "pipeline(4, 1f1b, 3)", "pipeline(2, interleaved(2), 4)",
))  # fmt: skip
@pytest.mark.parametrize("strategy", few(STRATEGIES, "local_sgd(period=4)"))
def test_a_small_model_is_rehearsed_as_it_runs(strategy: str, partition: str) -> None:
    """Of a small model the rehearsal is the run: the same seconds and bytes, on a slow link and with uneven times."""
    job = job_of(batch=12)
    site = site_of(job, "10mbit")
    found = predict_split(Strategy.parse(strategy), Pipeline.parse(partition), site, 4)
    seconds, sent = measured(job, strategy, partition, site, 48)
    assert found.seconds == pytest.approx(seconds, rel=0.01)
    assert found.sent_bytes == pytest.approx(sent, rel=0.01)


@pytest.mark.parametrize(
    "partition", ["pipeline(2, 1f1b, 4)", pytest.param("pipeline(4, gpipe, 2)", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("strategy", few(STRATEGIES, "all_reduce"))
def test_a_surrogate_stands_for_a_larger_model(strategy: str, partition: str) -> None:
    job = wide_job()
    site = site_of(job, "200mbit")
    found = predict_split(Strategy.parse(strategy), Pipeline.parse(partition), site, 4)
    seconds, sent = measured(job, strategy, partition, site, 16)
    assert found.seconds == pytest.approx(seconds, rel=0.05)
    assert found.sent_bytes == pytest.approx(sent, rel=0.05)


def test_activations_of_another_size_are_noticed() -> None:
    """Negative control: with half of the outputs the same rehearsal sends too little."""
    job = wide_job()
    site = site_of(job)
    shape = split_shape(site.task, Pipeline.parse("pipeline(2, gpipe, 1)"))
    less = dataclasses.replace(shape.chunks[0], sends=shape.chunks[0].sends / 2)
    thin = dataclasses.replace(shape, chunks=(less, *shape.chunks[1:]))
    assert thin.activation_bytes("float32") == shape.activation_bytes("float32") / 2 == BATCH * 256 * 4


@pytest.mark.parametrize(
    "partition", ["pipeline(2, gpipe, 2)", "pipeline(2, interleaved(2), 2)", "pipeline(3, 1f1b, 1, (2, 6))"]
)
def test_the_cut_and_the_shares_are_those_of_the_run(partition: str) -> None:
    job, pipeline = wide_job(), Pipeline.parse(partition)
    split, shape = split_torch(job, 0, pipeline), split_shape(task_of("job", None, job), pipeline)
    assert [sum(chunk.parameters for chunk in part) for part in shape.parts] == list(split.sizes)
    for part, chunks in zip(split.parts, shape.parts, strict=True):
        for mine, planned in zip(part.shares, chunks, strict=True):
            assert dataclasses.astuple(planned.shares) == pytest.approx(dataclasses.astuple(mine))
    shapes = [entry.shape for part in split.parts for entry in part.schema.entries]
    assert list(shape.tensors) == shapes


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
    assert memory_of(split_shape(task, Pipeline.parse(partition)), task) == parameters + 4 * 50 * held


def test_memory_of_a_whole_replica_counts_activations() -> None:
    job = wide_job()
    site = site_of(job)
    found = plan(site.task, site.cluster, strategies=("all_reduce",), further=False)
    assert found.alone.memory == site.task.nbytes * (2 + site.task.slots) + BATCH * 4 * (6 * 256 + 10)


@lru_cache
def advised(
    bandwidth: str, more: str = "", asked: tuple[str, ...] = (), compute: str = "constant(0.01)"
) -> HybridAdvice:
    site = site_of(wide_job(), bandwidth, more=more, compute=compute)
    outlook = plan(site.task, site.cluster, strategies=STRATEGIES, further=False)
    return advise_hybrid(outlook, advise(outlook), tuple(map(Pipeline.parse, asked)))


def test_on_a_fast_network_the_model_is_not_split() -> None:
    found = advised("100gbit")
    assert not isinstance(found.choice, SplitPrediction)
    assert str(found.partition) == "none"
    assert "Do not split the model" in found.sentences[0]
    assert found.splits, "splits were predicted, and lose"


def test_what_does_not_fit_is_split() -> None:
    found = advised("100gbit", 'memory = "1200kB"')
    assert isinstance(found.choice, SplitPrediction)
    assert found.choice.memory <= 1.2e6
    assert "Split each replica over" in found.sentences[0]
    assert (
        "No strategy with whole replicas meets the requirements: a whole replica needs at least" in found.sentences[1]
    )


def test_what_fits_nowhere_is_said() -> None:
    found = advised("100gbit", 'memory = "100kB"')
    assert found.choice is None
    assert "Neither whole nor split replicas fit into the 100 kB of a worker" in found.sentences[0]


def test_where_activations_are_smaller_than_weights_a_slow_network_splits() -> None:
    """2 × 16 samples × 256 floats cross the cut, 600 kB of gradients would cross every link."""
    found = advised("100mbit", "", ("pipeline(2, 1f1b, 2)", "pipeline(4, 1f1b, 4)"), "constant(0.02)")
    best = found.splits[0]
    assert isinstance(found.choice, SplitPrediction)
    assert found.choice is best
    assert f"--partition '{best.pipeline}'" in found.sentences[0]
    assert "times as fast as the best strategy with whole replicas" in found.sentences[1]
    assert found.speedups[best.name] > 1


def test_a_schedule_with_delays_needs_more_samples() -> None:
    site = site_of(wide_job())
    late, now = (
        predict_split(Strategy.parse("all_reduce"), Pipeline.parse(f"pipeline(4, {one}, 1)"), site, 4)
        for one in ("pipedream", "1f1b")
    )
    assert late.samples_per_second > 2 * now.samples_per_second
    assert late.relative_samples > now.relative_samples


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
    assert softmax.sentences == ("Do not split the model: softmax cannot be cut into stages that 4 workers fill.",)
    branches = flockstep.plan("googlenet", "laptop", strategies=["all_reduce"], hybrid=True).hybrid
    assert branches is not None
    assert "googlenet has branches" in branches.sentences[0]


def test_the_command_chooses_both(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "vgg-a", "-c", "lab-1gbit", "-n", "4", "-s", "all_reduce", "--memory", "1GB"]
    assert command([*words, "--partition", "pipeline(4, 1f1b, 8)", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["hybrid"]
    assert [one["partition"] for one in found["splits"]] == [str(Pipeline.parse("pipeline(4, 1f1b, 8)"))]
    assert found["splits"][0]["layers"][0] == "conv1_1"
    assert command([*words, "--partition", "pipeline(4, 1f1b, 8)"]) == 0
    said = capsys.readouterr().out
    assert "With whole replicas:" in said
    assert command([*words, "--partition", "none"]) == 2
    assert "a plan predicts partitions into the stages of a pipeline, got none" in capsys.readouterr().err
    assert command([*words[:-1], "1"]) == 2
    assert "memory must be > 0 bytes, with a unit" in capsys.readouterr().err


def test_shapes_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="layers of x are not known"):
        split_shape(JobProfile("x", 10), Pipeline.parse("pipeline(2, gpipe, 1)"))
    with pytest.raises(ConfigurationError, match="microbatches must be at most the 8 samples"):
        split_shape(two_layers(), Pipeline.parse("pipeline(2, gpipe, 9)"))
