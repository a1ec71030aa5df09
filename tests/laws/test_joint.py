"""Replicas that PyTorch divides over processes, in virtual time: gradients of the unsplit model, exact bytes and times.

`test_joint_real.py` compares them with processes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from flockstep.costs.layers import ModelShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.torch_layers import shape_of
from flockstep.partitions.base import Partition
from flockstep.records.events import NodeEvent
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.split.splitting import make_split, without_whole
from flockstep.split.torch_joint import TorchJointModel
from flockstep.split.torch_plan import drawing_apart
from flockstep.split.torch_stages import engine_of
from support.image_job import bare
from support.images_job import BATCH as IMAGES
from support.images_job import SIZE, images
from support.joint_jobs import LENGTH, WIDTH, WORDS, language_model, words_of
from support.split_jobs import BATCH, GRADIENT, chain, check_trains_as_whole, job_of, simulated, tied

FULL = pytest.mark.full
DIVIDED = "tensor(2, convolutions=divided)"


def pairs(*sizes: int) -> Callable[[], nn.Module]:
    """Linear layers without biases, in pairs with Tanh between them."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)]
        between = [one for layer in layers for one in (layer, nn.Tanh())]
        return nn.Sequential(*between[:-1]).double()

    return model


def normed() -> nn.Module:
    """A chain with batch normalization, in which one pair of layers can be split."""
    torch.manual_seed(4)
    first, second, third = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 1)
    return nn.Sequential(first, nn.Tanh(), second, nn.BatchNorm1d(7), nn.Tanh(), third).double()


class Traced(nn.Module):
    """A model that is no chain: a pair of layers with a function between them, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second, self.inner = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 7)
        self.head = nn.Sequential(nn.Linear(7, 4), nn.Tanh(), nn.Linear(4, 1))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        out: torch.Tensor = self.head(x + torch.tanh(self.inner(x)))
        return out


JOBS: dict[str, Callable[[], Job]] = {
    "chain": lambda: job_of(optimizer="sgd(lr=0.2, momentum=0.9)"),
    "traced": lambda: job_of(Traced),
    "tied": lambda: job_of(tied),
    "batch normalization": lambda: job_of(normed),
    "words": lambda: words_of(language_model()),
    "images": lambda: images(bare),
}


@pytest.mark.parametrize(
    ("job", "strategy", "partition"),
    [
        ("chain", "ps(bsp, shards=2)", "sharded(3)"),
        ("tied", "all_reduce", "sharded(2)"),
        ("traced", "local_sgd(period=2)", "tensor(2)"),
        ("batch normalization", "all_reduce", "tensor(2)"),
        ("words", "easgd(period=2, alpha=0.3)", "tensor(4)"),
        ("images", "all_reduce", DIVIDED),
    ],
)
def test_a_divided_replica_trains_the_unsplit_model(job: str, strategy: str, partition: str) -> None:
    """The oracle is the unsplit model in float64: parameters, losses and evaluations, with its running statistics."""
    check_trains_as_whole(JOBS[job](), strategy, partition)


def split_layers(job: Job, partition: str) -> TorchJointModel:
    model = make_split(job, 0, Partition.parse(partition))
    assert isinstance(model, TorchJointModel)
    return model


def test_what_each_part_trains() -> None:
    """Halves of both layers of each pair, and of what both compute with."""
    model = split_layers(job_of(Traced), "tensor(2)")
    names = [[entry.name for entry in part.schema.entries] for part in model.parts]
    halves = {f"{one}.weight" for one in ("first", "second", "head.0", "head.2")} | {"first.bias", "head.0.bias"}
    for way, own in enumerate(names):
        assert halves <= {name.removesuffix(f" (part {way})") for name in own}
    assert len(set(names[0]) | set(names[1])) == len(names[0]) + len(names[1])
    assert max(model.sizes) - min(model.sizes) <= 1
    assert sum(model.sizes) == sum(one.numel() for one in Traced().parameters())


def sent(job: Job, partition: str) -> list[float]:
    """Bytes that each way sends in a step."""
    ran = simulated(job, "local_sgd(period=100)", partition, replicas=1, steps=2)
    return [e.sent_bytes / 2 for e in sorted(ran.events, key=str) if isinstance(e, NodeEvent)]


class Mean(nn.Module):
    """The mean of the outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1, keepdim=True)


def test_shards_send_three_times_their_share_of_the_parameters() -> None:
    """Rajbhandari et al. 2020, section 7.2.2, for layers that four ways divide; and the losses, 8 bytes."""
    size = 8 * sum(one.numel() for one in pairs(8, 16, 12, 4)().parameters())

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8).double(), pairs(8, 16, 12, 4)(), Mean())

    others = 8 * (48 + 8)
    assert sum(sent(job_of(model), "sharded(4)")) == 3 * 3 * (size + others) + 2 * 3 * 8


@pytest.mark.parametrize("ways", [2, 4])
def test_exactly_one_sum_of_a_pair_of_layers_in_each_pass(ways: int) -> None:
    """Forward the outputs of both pairs, 12 numbers and one a sample; backward the inputs of the second, 12 numbers."""
    found = sent(job_of(pairs(6, 32, 12, 32, 1)), f"tensor({ways})")
    assert found == [2 * (ways - 1) / ways * 8 * BATCH * (12 + 1 + 12)] * ways


def test_the_sums_of_a_transformer() -> None:
    """Two layers of attention and two of perceptrons: four sums each, of the activations of all words, less that of the
    first inputs if these are not trained; an embedding; the inputs of the last layer; the loss: three sums of a number
    a word. Each way gives the others what it trains and they compute with.
    """
    model = split_layers(words_of(language_model()), "tensor(2)")
    copied = sum(one.size for part in engine_of(model).held for one in part if one.start is not None) / 2
    activations = 8 * BATCH * LENGTH * WIDTH
    expected = (8 + 1 + 1) * activations + 3 * 8 * BATCH * LENGTH + copied * 8
    assert sent(words_of(language_model()), "tensor(2)") == [expected] * 2


def shape() -> ModelShape:
    return shape_of(bare(), torch.zeros(1, 1, SIZE, SIZE).double())


@pytest.mark.parametrize("ways", [2, 4])
def test_the_bytes_of_divided_convolutions_are_those_of_the_formula(ways: int) -> None:
    """Data parallelism for the convolutions, and the pair's exchanges, for a batch of 12 samples that all ways share.

    Control: convolutions that every way computes need copies of their parameters, but no sum of gradients.
    """
    layers = {layer.name: layer for layer in shape().layers}
    front = sum(layers[name].data_bytes(ways, 8) for name in ("0", "2"))
    expected = front + shape().pair_bytes(layers["5"], layers["7"], IMAGES // ways, ways)
    assert sent(images(bare), f"tensor({ways}, convolutions=divided)") == [expected] * ways
    assert max(sent(images(bare), f"tensor({ways})")) < expected


def test_the_seconds_of_a_step_are_those_of_its_passes_and_sums() -> None:
    """Two ways with half of the work each, and three ring all-reduces of two messages on the critical path."""
    facts: dict[str, Any] = {"replicas": 1, "steps": 4}
    job = job_of(pairs(6, 32, 12, 32, 1))
    free = simulated(job, "local_sgd(period=100)", "tensor(2)", **facts)
    assert free.simulation.now == pytest.approx(4 * GRADIENT / 2)
    shared = simulated(job, "local_sgd(period=100)", "tensor(2)", network="link('1gbit', '1ms')", **facts)
    sums = sum(2 * (1e-3 + (BATCH * width * 8 / 2 + 64) * 8 / 1e9) for width in (12, 1, 12))
    assert shared.simulation.now == pytest.approx(4 * (GRADIENT / 2 + sums))


def test_a_replica_whose_worker_died_leaves_the_run() -> None:
    ran = simulated(job_of(), "gossip", "sharded(2)", replicas=3, steps=8, faults=("dies(2, 0.02)",), network="1gbit")
    assert isinstance(ran.simulation, SplitSimulation)
    steps = [group.runners[rank].node.step for rank in range(3) for group in ran.simulation.groups]
    assert steps[:2] == steps[4:] == [8, 8]
    assert max(steps[2:4]) < 8


PAIR: dict[str, Any] = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def planned(between: nn.Module, plan: dict[str, Any]) -> Job:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 1)).double()

    return dataclasses.replace(job_of(model), parallel_plan=plan)


def test_a_job_may_give_the_plan() -> None:
    """A layer that flockstep does not know to treat all elements alike."""

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * torch.tanh(x)

    job = planned(Doubled(), PAIR)
    check_trains_as_whole(job, "all_reduce", "tensor(2)")
    assert sent(job, "tensor(2)")[0] > 0
    with pytest.raises(ConfigurationError, match=r"no layer .* can be split over 2 ways, got Linear, Doubled;"):
        split_layers(dataclasses.replace(job, parallel_plan=None), "tensor(2)")


class Lists(nn.Module):
    """Layers in lists of lists, and one that the model uses without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        pairs = [nn.ModuleDict({"first": nn.Linear(6, 8), "second": nn.Linear(8, 6)}) for _ in range(2)]
        self.blocks, self.others = nn.ModuleList(pairs), nn.ModuleList([nn.Linear(6, 4)])
        self.last = nn.Linear(4, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for one in self.blocks:
            x = x + one["second"](torch.tanh(one["first"](x)))
        (other,) = self.others
        out: torch.Tensor = self.last(torch.tanh(nn.functional.linear(x, other.weight, other.bias)))
        return out


def test_fsdp_gathers_the_layers_that_the_model_calls() -> None:
    model = split_layers(job_of(Lists), "sharded(2)")
    called = [f"blocks.{at}.{name}" for at in (0, 1) for name in ("first", "second")]
    assert model.plan.gathered == (*called, "")
    check_trains_as_whole(job_of(Lists), "all_reduce", "sharded(2)")


def by_hand(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy, by operations that do not compute with outputs of which each process has a part."""
    return -outputs.log_softmax(-1).gather(-1, targets[..., None]).mean()


def test_a_loss_that_needs_whole_outputs_gets_them() -> None:
    job = dataclasses.replace(words_of(language_model()), loss=by_hand)
    assert "4" not in (split_layers(job, "tensor(2)").plan.split or {})
    assert "4" in (split_layers(words_of(language_model()), "tensor(2)").plan.split or {})


class Constant(nn.Module):
    """A layer with a constant that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.linspace(0, 1, 8).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.constant


def test_a_model_that_needs_values_is_built_whole() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), Constant(), nn.Linear(8, 1)).double()

    for built, obstacle in ((model, "a part without the whole model raised"), (chain, "")):
        job = job_of(built)
        assert without_whole(job, 0, make_split(job, 0, Partition.parse("sharded(2)"))).facts.obstacle.startswith(
            obstacle
        )


def test_dropout_by_a_function_does_not_hinder_the_comparison() -> None:
    """Loss and gradient are those without dropout."""

    class Drops(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.5)

    def trial(kind: type[nn.Linear]) -> tuple[float, float] | None:
        def model() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(kind(6, 8), nn.Linear(8, 1)).double()

        job = job_of(model)
        return without_whole(job, 0, make_split(job, 0, Partition.parse("sharded(2)"))).facts.trial

    assert trial(Drops) == pytest.approx(trial(nn.Linear))


def test_processes_draw_apart_inside_split_layers_and_alike_elsewhere() -> None:
    inside, behind = list[float](), list[float]()
    for rank in (0, 1):
        mesh: Any = SimpleNamespace(get_local_rank=lambda rank=rank: rank)
        torch.manual_seed(3)
        for _ in range(2):
            with drawing_apart(mesh):
                inside.append(float(torch.rand(())))
        behind.append(float(torch.rand(())))
    assert len(set(inside)) == 4
    assert behind[0] == behind[1]


def test_every_batch_of_divided_convolutions_is_checked() -> None:
    model = split_layers(images(bare), DIVIDED)
    with pytest.raises(ConfigurationError, match=r"every batch must be a multiple of the 2 ways of tensor.*, got 9"):
        model.require_batch(9)


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)).bfloat16()


def test_a_model_of_bfloat16_is_divided() -> None:
    def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.float().mean(-1, keepdim=True) - targets.float()).square().mean()

    model = split_layers(dataclasses.replace(job_of(half), loss=squared), "sharded(2)")
    assert {part.schema.dtype for part in model.parts} == {"float32"}


def centered() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), Centered(), nn.Linear(4, 1)).double()


class Centered(nn.Module):
    """A layer of the user that subtracts the mean over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def normed_by_batch() -> nn.Module:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 4), norm, nn.Linear(4, 1)).double()


def after(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        front, *rest = bare()
        return nn.Sequential(front, layer(), *rest).double()

    return model


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).sum()


@pytest.mark.parametrize(
    ("job", "partition", "reason"),
    [
        (lambda: job_of(normed), "sharded(2)", r"each sample on its own, got BatchNorm1d in 3 of job 'chain'; use for"),
        (lambda: job_of(normed_by_batch), "sharded(2)", r"each sample on its own, got BatchNorm1d in 1 of job 'chain'"),
        (lambda: job_of(centered), "sharded(2)", r"each sample on its own, got a loss of .* and a gradient at a dist"),
        (lambda: job_of(batch=2), "sharded(3)", r"ways of sharded.* must be at most the 2 samples of a batch"),
        (lambda: job_of(lambda: nn.Linear(6, 1, bias=False).double()), "sharded(2)", r"got none for process 1 of 2 "),
        (lambda: dataclasses.replace(job_of(), loss=summed), "sharded(2)", r"must be the mean over the .* use partit"),
        (lambda: dataclasses.replace(job_of(tied), parallel_plan=PAIR), "tensor(2)", r"share weights must stay"),
        (lambda: images(after(lambda: nn.BatchNorm2d(4))), DIVIDED, r"on its own, got BatchNorm2d in 1 of job"),
        (lambda: images(bare, 11), DIVIDED, r"every batch must be a multiple of the 2 ways .*, got 11"),
        (lambda: planned(nn.Tanh(), {"nope.*": ColwiseParallel()}), "tensor(2)", r"must name modules .*, got 'nope"),
        (lambda: job_of(), DIVIDED, r"needs layers with parameters before the first split layer"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_divided_are_refused(job: Callable[[], Job], partition: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        split_layers(job(), partition)


def test_ways_may_hold_different_numbers_of_words() -> None:
    assert WORDS % 2, "ways hold different numbers of words"
    assert np.diff(split_layers(words_of(language_model()), "tensor(2)").sizes) != 0
