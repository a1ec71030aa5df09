"""Split models in virtual time: their gradients against the unsplit model, their times against the schedule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flockstep
from flockstep import registry
from flockstep.codecs.base import Codec
from flockstep.errors import CompositionError, ConfigurationError, PeerLost, RunError
from flockstep.feedback.nothing import NoFeedback
from flockstep.feedback.sender import bound_codec
from flockstep.frameworks.base import Data, Job
from flockstep.partitions.base import Partition
from flockstep.partitions.pipeline import Pipeline
from flockstep.partitions.pipeline_schedules import PipeDream
from flockstep.programs import GRADIENT as NEXT
from flockstep.records.config import SPLIT, RunConfig
from flockstep.records.events import LostEvent, NodeEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.records.summary import summarize
from flockstep.report.table import gradient_notes
from flockstep.runtime.plan import Batches
from flockstep.runtime.setup import check
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.split.splitting import make_split
from flockstep.split.stages import MicroBatch
from flockstep.split.torch_stages import split_torch
from flockstep.strategies.base import Strategy
from flockstep_lab.pipeline_timeline import timeline
from support.matrix import few
from support.split_jobs import BATCH, GRADIENT, chain, job_of, simulated, tied

SYNCHRONOUS = (
    "pipeline(4, gpipe, 6)",
    "pipeline(4, 1f1b, 6)",
    "pipeline(2, interleaved(2), 6)",
    "pipeline(4, zb_h1, 6)",
    "pipeline(3, 1f1b, 5)",
)
"""The last divides twelve samples into micro-batches of two sizes."""
STRATEGIES = ("all_reduce", "local_sgd(period=2)", "ps(bsp, shards=2)")


@pytest.mark.parametrize("partition", SYNCHRONOUS)
@pytest.mark.parametrize(
    "strategy", [STRATEGIES[0], *(pytest.param(s, marks=pytest.mark.full) for s in STRATEGIES[1:])]
)
def test_a_synchronous_schedule_equals_the_unsplit_model(strategy: str, partition: str) -> None:
    job = job_of(optimizer="sgd(lr=0.2, momentum=0.9)")
    whole, split = simulated(job, strategy), simulated(job, strategy, partition)
    np.testing.assert_allclose(split.result, whole.result, rtol=0, atol=1e-13)
    assert np.abs(whole.result).max() > 0.1
    losses = [
        {(e.rank // parts, e.step): e.loss for e in ran.events if isinstance(e, StepEvent)}
        for ran, parts in ((whole, 1), (split, Pipeline.parse(partition).stages))
    ]
    assert losses[0].keys() == losses[1].keys()
    for key, loss in losses[0].items():
        assert loss == pytest.approx(losses[1][key], rel=1e-12), "every stage knows the loss"


def delayed_sgd(job, schedule_version: Callable[[int, int], int], cut: list[int], steps: int, samples) -> np.ndarray:
    """The oracle: every stage s steps along its part of the gradient at the weights w_s^(version(t, s)), all of one
    batch, with plain autograd on the unsplit model.
    """
    model = job.model()
    x, y = torch.tensor(job.data().train_x), torch.tensor(job.data().train_y)
    parameters = list(model.parameters())
    stage_of = [sum(index >= first for first in cut) for index in range(len(parameters))]
    history = [[p.detach().clone() for p in parameters]]
    for t in range(steps):
        with torch.no_grad():
            for index, p in enumerate(parameters):
                p.copy_(history[schedule_version(t, stage_of[index])][index])
        slopes = torch.autograd.grad(job.loss(model(x[samples[t]]), y[samples[t]]), parameters)
        history.append([w - 0.2 * g for w, g in zip(history[-1], slopes, strict=True)])
    return np.concatenate([p.numpy().reshape(-1) for p in history[-1]])


ASYNCHRONOUS = {
    "pipeline(4, pipedream, 1, (2, 4, 6))": lambda t, s: max(0, t - (3 - s)),
    "pipeline(4, pipedream(vertical_sync=True), 1, (2, 4, 6))": lambda t, s: max(0, t - 3),
    "pipeline(4, ddg, 1, (2, 4, 6))": lambda t, s: max(0, t - (3 - s)),
    "pipeline(4, pipedream_2bw, 4, (2, 4, 6))": lambda t, s: max(0, t - 1),
}


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("partition", ASYNCHRONOUS)
def test_an_asynchronous_schedule_equals_delayed_sgd(partition: str, replicas: int) -> None:
    """Several replicas average their gradients, of the same versions: one gradient of all their samples."""
    job, steps = job_of(), 9
    ran = simulated(job, "all_reduce", partition, replicas=replicas, steps=steps, compute="lognormal(0.01)")
    batches = [Batches(ran.simulation.plan, rank) for rank in range(replicas)]
    samples = [np.concatenate([each.next(NEXT) for each in batches]) for _ in range(steps)]
    oracle = partial(delayed_sgd, job, cut=[2, 4, 6], steps=steps, samples=samples)
    np.testing.assert_allclose(ran.result, oracle(ASYNCHRONOUS[partition]), rtol=0, atol=1e-13)
    assert np.abs(ran.result - oracle(lambda t, s: t)).max() > 1e-3, "negative control: it is not plain SGD"
    assert np.abs(ran.result - oracle(lambda t, s: max(0, t - 2))).max() > 1e-4, "nor of any other delay"


def test_pipedream_without_stashed_weights_is_noticed() -> None:
    """Negative control: backward passes at the latest weights."""

    class Unstashed(PipeDream):
        def version(self, step: int, stage: int, stages: int) -> int:
            return max(0, step - max(0, self.delay(stage, stages) - 1))

    with pytest.raises(RunError, match=r"uses version 1 of the weights of stage 0 in step 3, but .* versions \[0\]"):
        simulated(job_of(), "all_reduce", Pipeline(4, Unstashed(), 1))


@pytest.mark.parametrize(
    "partition",
    few([*SYNCHRONOUS[:4], "pipeline(4, pipedream, 1)", "pipeline(4, ddg, 1)"], SYNCHRONOUS[3], "pipeline(4, ddg, 1)"),
)
def test_the_seconds_of_a_run_are_those_of_its_schedule(partition: str) -> None:
    """With free messages and constant times: the end of the run, and the seconds of each stage."""
    ran = simulated(job_of(), "local_sgd(period=100)", partition, replicas=1, steps=5)
    simulation = ran.simulation
    assert isinstance(simulation, SplitSimulation)
    pipeline, parts = simulation.model.pipeline, simulation.model.parts

    def seconds(stage, work) -> float:
        if work.kind == "update":
            return 0.0
        return getattr(parts[stage].shares[work.chunk], work.kind) * GRADIENT / pipeline.microbatches

    times = timeline(pipeline, 5, seconds)
    last = max(stage[-1].end for stage in times)
    ends = {e.node: e.seconds for e in ran.events if isinstance(e, NodeEvent)}
    assert max(ends.values()) == pytest.approx(last)
    for e in ran.events:
        if isinstance(e, NodeEvent):
            own = sum(getattr(one, kind) for one in parts[e.node].shares for kind in ("forward", "backward"))
            assert e.compute_seconds == pytest.approx(5 * own * GRADIENT)
            assert e.compute_seconds + e.wait_seconds == pytest.approx(e.seconds)


@pytest.mark.parametrize(
    "partition", few(["pipeline(4, zb_h1, 6)", "pipeline(4, pipedream, 1)"], "pipeline(4, zb_h1, 6)")
)
def test_a_worker_draws_one_duration_for_each_step(partition: str) -> None:
    """Its passes take their shares of this draw, which is also that of the same worker and step of an unsplit run."""
    compute, steps = "slow_spells(lognormal(0.012, 1), 0.3, 10, 2)", 9
    ran = simulated(job_of(), "local_sgd(period=100)", partition, replicas=2, steps=steps, compute=compute)
    simulation = ran.simulation
    assert isinstance(simulation, SplitSimulation)
    whole = simulated(job_of(), "local_sgd(period=100)", replicas=8, steps=steps, compute=compute)
    unsplit = {e.node: e.compute_seconds for e in whole.events if isinstance(e, NodeEvent)}
    for e in ran.events:
        if isinstance(e, NodeEvent):
            own = sum(one.forward + one.backward for one in simulation.model.parts[e.node % 4].shares)
            assert e.compute_seconds == pytest.approx(own * unsplit[e.node])
    assert len({round(seconds, 9) for seconds in unsplit.values()}) == 8, "workers differ"


def test_the_shares_of_the_passes_make_up_a_gradient() -> None:
    shares = [one for part in split_torch(job_of(), 0, Pipeline(5)).parts for one in part.shares]
    assert sum(one.forward + one.backward for one in shares) == pytest.approx(1)
    assert shares[0].input_backward == 0, "data have no gradient"
    assert all(one.forward > 0 and one.weight_backward > 0 for one in shares)


@pytest.mark.parametrize(
    "partition",
    few(
        ["pipeline(4, gpipe, 6)", "pipeline(4, 1f1b, 6)", "pipeline(4, zb_h1, 6)", "pipeline(2, interleaved, 6)"],
        "pipeline(4, zb_h1, 6)",
    ),
)
def test_a_stage_keeps_as_many_activations_as_its_schedule_says(partition: str) -> None:
    most: dict[int, int] = {}

    def watched(simulation: SplitSimulation) -> None:
        for number, part in enumerate(simulation.model.parts):

            def forward(*given, part=part, number=number, compute=part.forward):
                made = compute(*given)
                most[number] = max(most.get(number, 0), len(part._kept))
                return made

            part.forward = forward  # type: ignore[method-assign]

    simulated(job_of(), "all_reduce", partition, replicas=1, prepare=watched)
    pipeline = Pipeline.parse(partition)
    facts = pipeline.stages, pipeline.microbatches
    assert most == {stage: pipeline.schedule.in_flight(stage, *facts) for stage in range(pipeline.stages)}


@pytest.mark.parametrize(
    "schedule", few(["pipedream", "pipedream(True)", "ddg", "pipedream_2bw", "1f1b"], "pipedream", "pipedream_2bw")
)
def test_a_stage_keeps_as_many_versions_as_its_schedule_says(schedule: str) -> None:
    pipeline = Pipeline.parse(f"pipeline(4, {schedule}, {4 if schedule in ('pipedream_2bw', '1f1b') else 1})")
    most = [0] * 4

    def watched(simulation: SplitSimulation) -> None:
        for number, part in enumerate(simulation.model.parts):

            def forward(*given, number=number, compute=part.forward):
                most[number] = max(most[number], len(simulation.program(number, 0).versions))
                return compute(*given)

            part.forward = forward  # type: ignore[method-assign]

    simulated(job_of(), "all_reduce", pipeline, replicas=1, steps=12, prepare=watched)
    assert most == [pipeline.schedule.versions(stage, 4) for stage in range(4)]


def test_activations_and_their_gradients_are_what_travels() -> None:
    """8, 8 and 5 numbers of 8 bytes for each sample, up and down, in a pipeline without another replica."""
    ran = simulated(job_of(), "local_sgd(period=100)", "pipeline(4, 1f1b, 6, (2, 4, 8))", replicas=1, network="1gbit")
    sent = [e.sent_bytes for e in sorted((e for e in ran.events if isinstance(e, NodeEvent)), key=lambda e: e.node)]
    assert sent == [6 * BATCH * 8 * width for width in (8, 8 + 8, 5 + 8, 5)]


@pytest.mark.parametrize("codec", few(["half", "int8", "topk(0.5)", "powersgd(2)"], "half"))
def test_activations_travel_encoded(codec: str) -> None:
    """Exactly the codec's bytes travel, and the gradients are those of the decoded activations."""
    texts = [f"pipeline(2, 1f1b, 3, (4,), {name})" for name in ("identity", codec)]
    plain, coded = (simulated(job_of(), "local_sgd(period=100)", text, replicas=1) for text in texts)
    each = BATCH // 3 * 8
    chosen = bound_codec(Codec.parse(codec), NoFeedback(), ((BATCH // 3, 8),), 0)
    sent = [e.sent_bytes for e in coded.events if isinstance(e, NodeEvent)]
    assert sent == [6 * 3 * chosen.wire_bytes(each, "float64")] * 2
    assert sent[0] < 6 * 3 * each * 8
    assert 1e-9 < np.abs(plain.result - coded.result).max() < 0.5


def with_dropout() -> nn.Sequential:
    layers = list(chain())
    return nn.Sequential(*layers[:2], nn.Dropout(0.5), *layers[2:6], nn.Dropout(0.5), *layers[6:])


@pytest.mark.full
def test_a_batch_that_grows_is_divided_as_it_is(tmp_path: Path) -> None:
    """Twelve samples, then twice as many, in five micro-batches of unequal sizes."""
    losses = [
        flockstep.simulate(
            "digits(batch=12)", "all_reduce", workers=workers, partition=partition, steps=8, seed=1,
            schedule="batch_increase(growth=2, at=(0.5,))", out=tmp_path / str(workers),
        ).summary.final_loss
        for workers, partition in ((2, None), (4, "pipeline(2, 1f1b, 5)"))
    ]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_dropout_draws_the_same_numbers_under_every_schedule() -> None:
    split = [simulated(job_of(with_dropout), "all_reduce", f"pipeline(4, {name}, 6)") for name in ("gpipe", "zb_h1")]
    np.testing.assert_allclose(split[0].result, split[1].result, rtol=0, atol=1e-13)
    whole = simulated(job_of(with_dropout), "all_reduce")
    part = split[0].simulation.model.parts[0]
    batches = [MicroBatch(0, 0, number, np.arange(4), 1.0) for number in (0, 1, 0)]
    draws = [part.forward(0, part.initial(), batch, None)[0] for batch in batches]
    assert np.array_equal(draws[0], draws[2])
    assert not np.array_equal(draws[0], draws[1])
    assert np.abs(whole.result - split[0].result).max() > 1e-4, "it draws for each micro-batch, not for the batch"


def test_batch_normalization_takes_in_every_micro_batch() -> None:
    def model() -> nn.Sequential:
        layers = list(chain())
        return nn.Sequential(layers[0], nn.BatchNorm1d(8).double(), *layers[1:])

    job = job_of(model)
    ran = simulated(job, "local_sgd(period=100)", "pipeline(2, 1f1b, 3, ('3',))", replicas=1, steps=1)
    simulation = ran.simulation
    samples = Batches(simulation.plan, 0).next(NEXT)
    assert "compute with all samples of a batch: BatchNorm1d in 1; use microbatches=1" in simulation.model.note
    assert split_torch(job, 0, Pipeline(2)).note is split_torch(job_of(), 0, Pipeline(2, microbatches=3)).note is None
    first, norm = model()[:2]
    for micro in np.split(samples, 3):
        norm(first(torch.tensor(job.data().train_x[micro])))
    found = simulation.model.engine.buffers(0)
    expected = [norm.running_mean, norm.running_var, norm.num_batches_tracked.double().reshape(1)]
    np.testing.assert_allclose(found, torch.cat(expected).detach().numpy(), atol=1e-13)
    whole = simulated(job, "local_sgd(period=100)", replicas=1, steps=1)
    assert whole.simulation.tracker.evaluation != simulation.tracker.evaluation, "the whole batch has other statistics"


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = chain()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x[:, :1]


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


class First(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return pair[0]


@pytest.mark.parametrize(
    ("model", "partition", "message"),
    [
        (Branch, "pipeline(2)", "at most 1 chunks, .* takes one tensor from the chunk before, got 2; use fewer stages"),
        (chain, "pipeline(6)", "can be cut into at most 5 chunks, .* got 6; use fewer stages"),
        (tied, "pipeline(4, pipedream)", "at most 3 chunks, .* 2 and 4 share weights and stay together, got 4"),
        (tied, "pipeline(2, ddg, split_at=('4',))", "2, 6, got '4'; .* stay together .2 and 4."),
        (tied, "pipeline(5)", "at most 4 chunks, .* got 5; use fewer stages"),
        (tied, "pipeline(2, split_at=('4',))", None),
        (tied, "pipeline(2, split_at=('6',))", None),
        (chain, "pipeline(2, split_at=(3,))", "at which a chunk can begin: 2, 4, 6, 8, got '3'"),
        (chain, "pipeline(3, split_at=(2,))", "must name 2 layers for 3 chunks, got 1; choose among 2, 4, 6, 8"),
        (chain, "pipeline(3, split_at=(4, 2))", "in the order of the model, got 4, 2; sort them"),
        (
            lambda: nn.Sequential(*list(chain())[:2], Pair(), First(), *list(chain())[2:]),
            "pipeline(2, split_at=(4,))",
            None,
        ),
        (
            lambda: nn.Sequential(chain()[0], Pair(), nn.Sequential(First(), chain()[2], nn.Linear(8, 1).double())),
            "pipeline(2, split_at=('2.1',))",
            None,
        ),
    ],
)  # fmt: skip
def test_what_can_be_cut_and_what_cannot(model, partition: str, message: str | None) -> None:
    if message is None:
        assert len(split_torch(job_of(model), 0, Pipeline.parse(partition)).parts) == 2
        return
    with pytest.raises(ConfigurationError, match=message):
        split_torch(job_of(model), 0, Pipeline.parse(partition))


def with_one_activation() -> nn.Sequential:
    """The same module after each of two layers."""
    act, layers = nn.Tanh(), list(chain())
    return nn.Sequential(layers[0], act, layers[2], act, layers[4], nn.Linear(7, 1).double())


def with_one_layer() -> nn.Sequential:
    """The same layer with weights three times, one of them inside another chain."""
    layers = list(chain())
    return nn.Sequential(
        layers[0], layers[2], nn.Tanh(), layers[2], nn.Sequential(nn.Tanh(), layers[2]), nn.Linear(8, 1).double()
    )


@pytest.mark.parametrize(
    ("model", "partition"),
    [
        (with_one_activation, "pipeline(3, 1f1b, 4)"),
        (with_one_layer, "pipeline(3, 1f1b, 4)"),
        pytest.param(with_one_layer, "pipeline(2, 1f1b, 4, ('1',))", marks=pytest.mark.full),
    ],
)
def test_a_module_that_appears_twice_runs_twice(model: Callable[[], nn.Module], partition: str) -> None:
    """Against gradient descent in plain torch."""
    job = job_of(model)
    ran = simulated(job, "all_reduce", partition, replicas=1)
    batches, plain, data = Batches(ran.simulation.plan, 0), model(), job.data()
    for _ in range(6):
        index = batches.next(NEXT)
        x, y = torch.tensor(data.train_x[index]), torch.tensor(data.train_y[index])
        slopes = torch.autograd.grad(job.loss(plain(x), y), list(plain.parameters()))
        with torch.no_grad():
            for p, slope in zip(plain.parameters(), slopes, strict=True):
                p.sub_(slope, alpha=0.2)
    expected = torch.cat([p.detach().reshape(-1) for p in plain.parameters()]).numpy()
    np.testing.assert_allclose(ran.result, expected, rtol=0, atol=1e-13)
    whole = simulated(job, "all_reduce", replicas=1)
    np.testing.assert_allclose(whole.result, expected, rtol=0, atol=1e-13)
    assert whole.simulation.tracker.evaluation.loss == pytest.approx(ran.simulation.tracker.evaluation.loss, rel=1e-12)


def with_hook() -> nn.Module:
    model = chain()
    model.register_forward_hook(lambda module, inputs, outputs: 3 * outputs)
    return model


def with_inner_hook() -> nn.Module:
    layers = list(chain())
    inner = nn.Sequential(*layers[:4])
    inner.register_forward_pre_hook(lambda module, inputs: (3 * inputs[0],))
    return nn.Sequential(inner, *layers[4:])


class Scaled(nn.Sequential):
    """Does more than its layers, but not in `forward`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 1.001 * super().__call__(x)


def with_shared_statistics() -> nn.Module:
    norm, layers = nn.BatchNorm1d(8, affine=False).double(), list(chain())
    return nn.Sequential(layers[0], norm, layers[2], norm, *layers[4:])


def with_noise() -> nn.Module:
    """Draws random numbers in two stages, and keeps statistics."""
    layers = list(chain())
    return nn.Sequential(
        layers[0], nn.BatchNorm1d(8).double(), nn.Dropout(0.5), *layers[1:4], nn.Dropout(0.5), *layers[4:]
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_hook, "must have no hooks, got hooks on the model of job 'chain'; put"),
        (with_inner_hook, "must have no hooks, got hooks on layer '0' of the model of job 'chain'; put"),
        (lambda: Scaled(*chain()), "must compute what the model computes, got a loss of .* or use partition=none"),
        (with_shared_statistics, "must be in one stage, got 1 and 3 of job 'chain', which share '1.running_mean'; cut"),
        (with_noise, None),
    ],
)
def test_the_stages_are_compared_with_the_model(model: Callable[[], nn.Module], message: str | None) -> None:
    facts = job_of(model), 0, Pipeline.parse("pipeline(3)")
    if message is None:
        split = split_torch(*facts)
        fresh = [b.double().reshape(-1) for b in split.engine.whole.module.buffers()]  # type: ignore[attr-defined]
        assert np.array_equal(split.engine.buffers(0), torch.cat(fresh).numpy())
        assert not split.engine.buffers(0)[:8].any(), "the comparison leaves no trace in the statistics"
        return
    with pytest.raises(ConfigurationError, match=message):
        split_torch(*facts)


def classified(loss: Callable[[Any, Any], Any], with_statistics: bool = False) -> Job:
    """A classification in three classes, of which the last is rare."""
    job = job_of()
    x = job.data().train_x

    def model() -> nn.Module:
        layers = list(chain())[:6]
        middle = [nn.BatchNorm1d(8).double()] if with_statistics else []
        return nn.Sequential(*layers[:1], *middle, *layers[1:], nn.Linear(7, 3).double())

    y = (x[:, 0] > 0).astype(np.int64)
    y[55:60] = 2
    return dataclasses.replace(job, model=model, data=lambda: Data(x, y, x[:40], y[:40]), loss=loss, metric=None)


WEIGHTS = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "refused"),
    [
        (nn.CrossEntropyLoss(), False),
        (nn.CrossEntropyLoss(reduction="sum"), True),
        (nn.CrossEntropyLoss(weight=WEIGHTS), True),
        (nn.CrossEntropyLoss(ignore_index=2), True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), False),
        (lambda outputs, targets: outputs.sum() * math.nan, False),
    ],
)
def test_a_loss_that_micro_batches_change_is_refused(loss: Callable[[Any, Any], Any], refused: bool) -> None:
    """Batch normalization, whose statistics micro-batches change by design, is not refused."""
    for with_statistics in (False, True):
        job = classified(loss, with_statistics)
        split_torch(job, 0, Pipeline.parse("pipeline(2, gpipe, 1)"))
        if not refused:
            split_torch(job, 0, Pipeline.parse("pipeline(2, gpipe, 5)"))
            continue
        with pytest.raises(ConfigurationError, match=r"must be the mean over the samples .* use microbatches=1, or a"):
            split_torch(job, 0, Pipeline.parse("pipeline(2, gpipe, 5)"))


def test_only_one_tensor_of_floats_travels() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = chain()[2]

        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return self.layer(pair[0])

    def model() -> nn.Sequential:
        return nn.Sequential(chain()[0], Pair(), Both(), nn.Linear(8, 1).double())

    with pytest.raises(ConfigurationError, match=r"output of layer '1' must be one tensor .* got <class 'tuple'>"):
        split_torch(job_of(model), 0, Pipeline.parse("pipeline(2, split_at=(2,))"))


@pytest.mark.parametrize(
    ("strategy", "optimizer", "partition", "message"),
    [
        (
            "all_reduce",
            "clipped(sgd(lr=0.1), 1)",
            "pipeline(4)",
            "update their own parameters, got clipped.*elementwise",
        ),
        (
            "codistillation",
            "sgd(lr=0.1)",
            "pipeline(4)",
            "whose workers compute only the gradient of their next batch, got codist",
        ),
        ("ps(bsp, replicas=1)", "sgd(lr=0.1)", "pipeline(4)", "servers of a split model have no backups yet"),
        (
            "all_reduce",
            """torch(groups='[{}, {"lr": 2}]', spans='[[0, 9, 0], [9, 200, 1]]')""",
            "pipeline(4)",
            "update their own parameters, got torch",
        ),
        (
            "gradient_coding(1)",
            "sgd(lr=0.1)",
            "pipeline(4)",
            "only the gradient of their next batch, got gradient_coding",
        ),
        ("ps(consistency=backup(1))", "sgd(lr=0.1)", "pipeline(4)", "compute only the gradient of their next batch"),
        ("all_reduce", "sgd(lr=0.1)", "pipeline(4, 1f1b, 13)", "at most the 12 samples of a batch, got 13"),
    ],
)
def test_what_a_split_model_does_not_run_is_refused(
    strategy: str, optimizer: str, partition: str, message: str
) -> None:
    with pytest.raises((CompositionError, ConfigurationError), match=message):
        simulated(job_of(optimizer=optimizer), strategy, partition, replicas=3)


def test_a_slow_link_makes_the_pipeline_wait() -> None:
    """Eight numbers of 8 bytes for each sample, and a header of 64 bytes, up and down in every step."""
    facts = job_of(), "local_sgd(period=100)", "pipeline(2, gpipe, 1, (4,))"
    ideal, slow = (simulated(*facts, replicas=1, steps=3, network=name) for name in ("ideal", "link('1mbit', 0.001)"))
    np.testing.assert_array_equal(ideal.result, slow.result)
    assert ideal.simulation.now == pytest.approx(3 * GRADIENT)
    assert slow.simulation.now == pytest.approx(3 * (GRADIENT + 2 * (0.001 + (BATCH * 8 * 8 + 64) / 125_000)))


def test_a_dead_stage_takes_its_replica_with_it() -> None:
    """Worker 5 is stage 1 of the second replica; the other two replicas go on to the end."""
    ran = simulated(
        job_of(), "ps(asynchronous)", "pipeline(4, 1f1b, 4)", replicas=3, steps=8, faults=("dies(5, '30ms', '10ms')",)
    )
    lost = {e.node: e.reason for e in ran.events if isinstance(e, LostEvent)}
    assert lost == {5: "worker 5 died", **dict.fromkeys((4, 6, 7), "worker 5 of the same replica died")}
    steps = {rank: max(e.step for e in ran.events if isinstance(e, StepEvent) and e.rank == rank) for rank in range(12)}
    assert {rank for rank, step in steps.items() if step == 8} == set(range(12)) - {4, 5, 6, 7}
    assert all(1 <= steps[rank] < 8 for rank in (4, 5, 6, 7))
    assert ran.result.any()


@pytest.mark.parametrize(
    ("strategy", "fault", "message"),
    [
        ("all_reduce", "dies(5, '30ms')", "worker 5 died at step"),
        ("ps(bsp)", "dies(-3, '30ms')", "server 2 died at step"),
    ],
)
def test_a_death_that_the_strategy_does_not_survive_ends_the_run(strategy: str, fault: str, message: str) -> None:
    with pytest.raises(PeerLost, match=message):
        simulated(job_of(), strategy, "pipeline(4, 1f1b, 4)", replicas=2, faults=(fault,))


def test_a_dead_stage_leaves_the_cores_to_the_others() -> None:
    """Two replicas of one micro-batch take turns on one core, one stage of each at any time, until one dies at 50 ms.

    The other has computed for 25 ms until then, and has the core for the remaining 95 ms.
    """
    facts = job_of(), "ps(asynchronous)", "pipeline(2, gpipe, 1)"
    ran = simulated(
        *facts, steps=10, compute=f"shared_cores(constant({GRADIENT}), 1, turns=true)", faults=("dies(2, 0.05, 10)",)
    )
    assert ran.simulation.now >= 10
    last = max(e.seconds for e in ran.events if isinstance(e, StepEvent))
    assert last == pytest.approx(0.05 + 10 * GRADIENT - 0.025)


def test_a_worker_that_dies_between_two_parts_of_a_gradient_gets_no_more() -> None:
    answered: list[float] = []

    def dying(simulation: SplitSimulation) -> None:
        group = simulation.groups[1]

        def answer(rank: int, gradient: Any, loss: float, give=group.answer) -> None:
            if rank == 0 and simulation.now > 0.03:
                answered.append(simulation.now)
                simulation._queue.schedule(simulation.now, partial(simulation._die, 1))
            give(rank, gradient, loss)

        group.answer = answer  # type: ignore[method-assign]

    with pytest.raises(RunError, match="deadlock"):
        simulated(job_of(), "bucketed(cap=0.0001, first=0.0001)", "pipeline(2, gpipe, 1)", prepare=dying)
    assert len(answered) == 1


def test_a_slow_stage_slows_its_replica_only() -> None:
    """Worker 6 is stage 2 of the second replica."""
    facts = job_of(), "ensemble", "pipeline(4, 1f1b, 4)"
    plain, slow = simulated(*facts), simulated(*facts, faults=("slows(6, 10)",))
    ends = [{e.node: e.seconds for e in ran.events if isinstance(e, NodeEvent)} for ran in (plain, slow)]
    assert all(ends[0][rank] == ends[1][rank] for rank in range(4))
    assert all(ends[0][rank] * 2 < ends[1][rank] for rank in range(4, 8))


WHOLE_VECTORS = ("sparta", "powersgd", "slice_servers")
"""These select, factor or divide the parameters by their places, which differ in the parts of a model."""


@pytest.mark.parametrize("strategy", few(registry.names("strategy"), "bucketed", "ps"))
def test_every_strategy_runs_split_or_says_why_not(strategy: str) -> None:
    plain = Strategy.parse(strategy).traits.plain_gradients
    if not plain or "factor" in strategy:
        with pytest.raises(CompositionError, match=r"compute only the gradient of|no layer that can be factored"):
            simulated(job_of(), strategy, "pipeline(4, 1f1b, 4)", replicas=4, steps=4)
        return
    whole = simulated(job_of(), strategy, replicas=4, steps=4)
    split = simulated(job_of(), strategy, "pipeline(4, 1f1b, 4)", replicas=4, steps=4)
    if strategy not in (*WHOLE_VECTORS, "ensemble"):
        np.testing.assert_allclose(split.result, whole.result, rtol=0, atol=1e-12)


def test_the_record_of_a_split_run(tmp_path: Path) -> None:
    """All updates arrive, replicas agree part by part, and the figures per worker are those of all eight workers."""
    ran = flockstep.simulate(
        "digits(batch=8)", "ps(bsp, shards=2)", workers=8, partition="pipeline(4, 1f1b, 4)", steps=3, out=tmp_path
    )
    summary, config = ran.summary, RunFolder(tmp_path).read_config()
    assert config.partition == "pipeline(stages=4, schedule=1f1b, microbatches=4)"
    assert "--partition 'pipeline(stages=4" in config.command
    assert (summary.workers, len(summary.per_worker), len(summary.hashes)) == (8, 8, 8 + 4 * 2)
    assert summary.completeness == 1
    assert summary.replicas_agree
    assert summary.samples == 2 * 8 * 3
    assert all(one.sent_bytes for one in summary.per_worker)
    assert summary.notes == []
    again = flockstep.simulate("digits(batch=8)", "ps(bsp, shards=2)", workers=2, steps=3, out=tmp_path / "unsplit")
    assert again.summary.final_loss == pytest.approx(summary.final_loss, rel=1e-5)
    assert np.load(tmp_path / "result.npy").shape == np.load(tmp_path / "unsplit" / "result.npy").shape


class Centered(nn.Module):
    """A layer of the user that subtracts the mean over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("layer", [Centered, nn.LayerNorm])
def test_a_layer_that_averages_over_the_batch_is_told(layer: type[nn.Module]) -> None:
    def model() -> nn.Module:
        layers = list(chain())
        given = () if layer is Centered else (8,)
        return nn.Sequential(*layers[:2], nn.Dropout(0.5), layer(*given).double(), *layers[2:])

    split = make_split(job_of(model), 0, Partition.parse("pipeline(2, 1f1b, 3)"))
    assert split.note is None or "some layer, which gives a loss of" in split.note
    assert (split.note is None) == (layer is nn.LayerNorm)


@pytest.mark.parametrize(
    ("partition", "said"),
    [
        ("pipeline(2)", ["Only one of the 2 stages computes most of the time", "A layer."]),
        ("pipeline(2, pipedream)", ["Stages 0 to 1 compute gradients with weights that are 1, 0", "A layer."]),
        ("sharded(2)", ["A layer."]),
    ],
)
def test_the_record_says_what_a_partition_changes(partition: str, said: list[str]) -> None:
    facts: dict[str, Any] = {
        "kind": "simulate",
        "job": "digits",
        "strategy": "ps",
        "workers": 4,
        "partition": partition,
    }
    config = RunConfig(**facts, versions={SPLIT: "A layer."})
    found = summarize(config, [], "finished").notes
    assert sorted(found) == sorted(gradient_notes([config]))
    assert [one.startswith(text) for one, text in zip(found, said, strict=True)] == [True] * len(said)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 6}, "multiple of 4 for pipeline.*, got 6; use 4, or a multiple of it"),
        ({"workers": 4, "faults": ("drops(0, 1)",)}, r"drops.* cannot be injected .* use one of dies, narrows, slows"),
        ({"workers": 4, "faults": ("dies(4, 0.5)",)}, r"worker 4 does not exist in this run: there are 4 workers"),
        ({"workers": 4, "max_gradient_norm": 1.0}, "max_gradient_norm need whole gradients"),
        ({"workers": 4, "batch": 7}, "microbatches must be at most the 7 samples of a batch, got 8; use a larger"),
        ({"workers": 4, "job": "softmax"}, "must be a torch.nn.Module, got SoftmaxRegression of job 'softmax'"),
    ],
)
def test_a_run_that_cannot_be_split_is_refused_before_it_starts(tmp_path: Path, given: Any, message: str) -> None:
    options = {"job": "digits", "workers": 8, "steps": 2, **given}
    with pytest.raises(ConfigurationError, match=message):
        flockstep.simulate(
            options.pop("job"), "all_reduce", partition="pipeline(4, 1f1b, 8)", out=tmp_path / "run", **options
        )
    assert not (tmp_path / "run").exists()


def test_models_of_scripts_are_not_split() -> None:
    config = RunConfig(kind="launch", job="digits", strategy="all_reduce", workers=4, partition="pipeline(4)")
    with pytest.raises(ConfigurationError, match=r"a script cannot be split, got pipeline.* for flockstep launch"):
        check(config)
    assert check(dataclasses.replace(config, partition="none")) == Strategy.parse("all_reduce")


class Work(nn.Module):
    """A linear layer whose inputs are in the same memory for every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.memory = nn.Linear(6, 6), torch.zeros(64, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inputs = self.memory[: len(x)]
        with torch.no_grad():
            inputs.copy_(x).clamp_(-1, 1)
        out: torch.Tensor = x + self.layer(inputs)
        return out


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in the backward pass."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


class Alias(nn.Module):
    """A layer whose outputs are memory of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outputs.expand(len(x), 6)


class Elsewhere(nn.Module):
    """A layer that reads its weight from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.read = [self.layer.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) / self.read[0].detach().norm()
        return out


def around(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A model of the layers with linear layers around each."""

    def model() -> nn.Module:
        torch.manual_seed(2)
        first = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
        between = [one for layer in layers for one in (layer(), nn.Linear(6, 6))]
        return nn.Sequential(*first, *between, nn.Linear(6, 1)).double()

    return model


@pytest.mark.parametrize(
    ("model", "partition"),
    [
        (around(Work), "pipeline(2, 1f1b, 4)"),
        (around(Checkpointed, Checkpointed), "pipeline(2, gpipe, 4)"),
        (around(Checkpointed, Checkpointed), "pipeline(2, zb_h1, 4)"),
    ],
)
def test_memory_and_time_of_activations_do_not_change_gradients(model: Callable[[], nn.Module], partition: str) -> None:
    job = job_of(model, optimizer="sgd(lr=0.02)")
    whole, split = simulated(job, "all_reduce", replicas=1), simulated(job, "all_reduce", partition, replicas=1)
    np.testing.assert_allclose(split.result, whole.result, rtol=0, atol=1e-12)


def test_a_model_that_reads_its_initial_parameters_is_refused() -> None:
    """The parameters that a part computes with are equal to those of the model before the first step only."""
    with pytest.raises(ConfigurationError, match=r"must compute what the model computes, got .* from its attributes"):
        simulated(job_of(around(Elsewhere)), "all_reduce", "pipeline(2, gpipe, 4)", replicas=1)


def test_activation_checkpointing_that_is_reentrant_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"must work on its first batch, got .*use_reentrant=False"):
        split_torch(job_of(around(partial(Checkpointed, reentrant=True))), 0, Pipeline(2, microbatches=4))
