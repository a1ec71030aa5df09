"""Convolutions divided by samples before split fully connected layers (Krizhevsky 2014): the unsplit model, exact bytes
and times, and what is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flockstep.arrays.schema import FlatArray
from flockstep.costs.layers import ModelShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_layers import shape_of
from flockstep.partitions.base import Partition
from flockstep.partitions.tensor import TensorParallel
from flockstep.records.events import NodeEvent, StepEvent
from flockstep.split import tensor_program
from flockstep.split.splitting import make_split, without_whole
from flockstep.split.stages import MicroBatch
from flockstep.split.tensor_program import TensorWay
from flockstep.split.torch_ways import TorchWay, split_layers
from flockstep.split.ways import TensorModel, WayWeights
from support.images_job import BATCH, CLASSES, SIZE, Traced, convolutional, images
from support.split_jobs import GRADIENT, check_trains_as_whole, simulated

DIVIDED = "tensor(2, convolutions=divided)"
PRODUCTS = (
    "pipeline(2, 1f1b, 3, (10,)) * tensor(2, convolutions=divided)",
    "pipeline(2, zb_h1, 4, (10,)) * tensor(2, convolutions=divided)",
)
FULL = pytest.mark.full


def divided(ways: int) -> TensorParallel:
    return TensorParallel(ways, convolutions="divided")


@pytest.mark.parametrize(
    ("model", "strategy", "partition"),
    [
        (convolutional, "all_reduce", "tensor(5, convolutions=divided)"),
        (Traced, "ps(bsp, shards=2)", "tensor(2, collective=recursive_doubling, convolutions=divided)"),
        *(
            pytest.param(model, strategy, partition, marks=FULL)
            for model in (convolutional, Traced)
            for strategy in ("all_reduce", "local_sgd(period=2)", "ps(bsp, shards=2)")
            for partition in (DIVIDED, "tensor(7, convolutions=divided)", *(PRODUCTS if model is convolutional else ()))
        ),
    ],
)
def test_divided_convolutions_compute_the_unsplit_model(
    model: Callable[[], nn.Module], strategy: str, partition: str
) -> None:
    """Oracle: the unsplit model in float64. 5 and 7 ways do not divide the 12 samples of a batch."""
    check_trains_as_whole(images(model), strategy, partition)


@pytest.mark.full
def test_divided_convolutions_of_an_asynchronous_pipeline_use_its_versions() -> None:
    """Oracle: the same pipeline without ways, whose delays change the result."""
    pipeline = "pipeline(2, pipedream, 1, (10,))"
    facts: dict[str, Any] = {"replicas": 1, "steps": 8}
    alone = simulated(images(), "all_reduce", pipeline, **facts)
    split = simulated(images(), "all_reduce", f"{pipeline} * {DIVIDED}", **facts)
    np.testing.assert_allclose(split.result, alone.result, rtol=0, atol=1e-12)
    assert np.abs(split.result - simulated(images(), "all_reduce", **facts).result).max() > 1e-3


def test_every_way_computes_its_own_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares of five ways are disjoint, and cover the batch."""
    seen = defaultdict[int, list[tuple[int, ...]]](list)
    compute = TorchWay.divided

    def watched(self: TorchWay, weights: WayWeights, batch: MicroBatch) -> FlatArray:
        seen[batch.step].append(tuple(batch.indices))
        return compute(self, weights, batch)

    monkeypatch.setattr(TorchWay, "divided", watched)
    simulated(images(), "all_reduce", "tensor(5, convolutions=divided)", replicas=1, steps=3)
    for step in range(3):
        shares = seen[step][-5:]  # the comparison before the run is of step 0
        assert sorted(map(len, shares)) == [2, 2, 2, 3, 3]
        assert len({one for share in shares for one in share}) == BATCH


@pytest.mark.parametrize("broken", ["gathered", "returned", "parameters"])
def test_an_exchange_that_is_left_out_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls, noticed before the run: own activations in the place of those of other ways, own terms of
    gradients, own gradients.
    """
    gather, add = TensorWay._gathered, tensor_program.sum_shares

    async def own_rows(self: TensorWay, *given: Any) -> FlatArray:
        every = await gather(self, *given)
        half, rank = len(every) // 2, self._group.rank
        own = every[rank * half : (rank + 1) * half]
        return np.concatenate([own, own])

    async def own_terms(me: Any, array: FlatArray, shares: Any) -> FlatArray:
        before, of_parameters = array.copy(), shares[0].start > 0
        total = await add(me, array, shares)
        if of_parameters == (broken == "parameters"):
            array[:] = before
        return total

    if broken == "gathered":
        monkeypatch.setattr(TensorWay, "_gathered", own_rows)
    else:
        monkeypatch.setattr(tensor_program, "sum_shares", own_terms)
    with pytest.raises(ConfigurationError, match="must compute what the model computes, got a loss of"):
        simulated(images(), "all_reduce", DIVIDED)


def bare(biases: bool = True) -> nn.Sequential:
    """Convolutions without padding and one pair, whose second layer has no bias: no way copies anything else."""
    torch.manual_seed(0)
    front = nn.Conv2d(1, 3, 3, bias=biases), nn.ReLU(), nn.Conv2d(3, 4, 3, bias=biases), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*front, nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, CLASSES, bias=False)).double()


def sent(partition: str, model: Callable[[], nn.Module] = bare) -> float:
    """Mean bytes that a way sends in a step."""
    ran = simulated(images(model), "local_sgd(period=100)", partition, replicas=1, steps=2)
    events = [e.sent_bytes for e in ran.events if isinstance(e, NodeEvent)]
    return sum(events) / len(events) / 2


def shape(model: Callable[[], nn.Module] = bare) -> ModelShape:
    return shape_of(model(), torch.zeros(1, 1, SIZE, SIZE).double())


@pytest.mark.parametrize("ways", [2, 4])
def test_the_bytes_are_those_of_the_formula(ways: int) -> None:
    """Data parallelism for the convolutions, and the pair's exchanges, for a batch of 12 samples that all ways share.

    Control: convolutions that every way computes need the copies of their parameters, but no sum of gradients.
    """
    layers = {layer.name: layer for layer in shape().layers}
    front = sum(layers[name].data_bytes(ways, 8) for name in ("0", "2"))
    expected = front + shape().pair_bytes(layers["5"], layers["7"], BATCH // ways, ways)
    assert sent(f"tensor({ways}, convolutions=divided)") == expected
    assert sent(f"tensor({ways})") == expected - front / 2


def test_the_seconds_of_a_step_are_those_of_shares_of_the_convolutions() -> None:
    """A half of all work for each way, and of the convolutions without division: all of it."""
    facts: dict[str, Any] = {"replicas": 1, "steps": 4}
    whole = shape(lambda: bare(biases=False)).work(BATCH)
    layers = shape(lambda: bare(biases=False)).layers
    front = sum(layer.work(BATCH) for layer in layers[:5]) - layers[0].by_input.work(BATCH)
    free = simulated(images(bare), "local_sgd(period=100)", DIVIDED, **facts)
    assert free.simulation.now == pytest.approx(4 * GRADIENT / 2)
    plain = simulated(images(bare), "local_sgd(period=100)", "tensor(2)", **facts)
    assert 4 * GRADIENT / 2 < plain.simulation.now < 4 * GRADIENT * (front / whole + (1 - front / whole) / 2)


def test_dropout_among_divided_layers_has_a_stream_for_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[bytes] = []
    forward = nn.Dropout2d.forward

    def watched(self: nn.Dropout2d, x: torch.Tensor) -> torch.Tensor:
        found = forward(self, x)
        if self.training:
            masks.append((found == 0).numpy().tobytes())
        return found

    def model() -> nn.Module:
        return convolutional(nn.Dropout2d)

    split_layers(images(model), 0, divided(2))
    monkeypatch.setattr(nn.Dropout2d, "forward", watched)
    ran = simulated(images(model), "local_sgd(period=100)", DIVIDED, replicas=1, steps=5)
    assert len(set(masks[-10:])) == 10, "each way and step has a mask of its own"
    losses = defaultdict[int, set[float | None]](set)
    for event in ran.events:
        if isinstance(event, StepEvent):
            losses[event.step].add(event.loss)
    assert [len(each) for each in losses.values()] == [1] * 5


class Centered(nn.Module):
    """A layer whose outputs depend on the mean of all samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Counting(nn.Module):
    """A layer that counts its samples in a buffer."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return x


@pytest.mark.parametrize(
    ("after", "partition", "batch", "message"),
    [
        (lambda: nn.BatchNorm2d(3), DIVIDED, 12, "must compute each sample on its own, got BatchNorm2d in 1 of job"),
        (lambda: nn.BatchNorm2d(3, track_running_stats=False), DIVIDED, 12, "got BatchNorm2d in 1 of job"),
        (Counting, DIVIDED, 12, "each sample on its own, got the buffer 1.seen, which changes in training, of job"),
        (Centered, DIVIDED, 12, "split over 2 ways, must compute what the model computes, got a "),
        (nn.Tanh, "tensor(4, convolutions=divided)", 3, "ways of tensor must be at most the 3 samples of a batch"),
        (nn.Tanh, f"pipeline(2, 1f1b, 1, (3,)) * {DIVIDED}", 12, "before the first split layer of job 'images', both"),
    ],
)  # fmt: skip
def test_what_is_refused(after: Callable[[], nn.Module], partition: str, batch: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_split(images(lambda: convolutional(after), batch), 0, Partition.parse(partition))


def test_a_model_without_layers_before_split_layers_is_refused() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    with pytest.raises(ConfigurationError, match=r"needs layers with parameters before the .*, got 0; use"):
        split_layers(images(model), 0, divided(2))
    split_layers(images(model), 0, TensorParallel(2))


def test_convolutions_that_are_not_trained_are_gathered_only() -> None:
    def model() -> nn.Module:
        made = bare()
        for layer in made[:5]:
            layer.requires_grad_(requires_grad=False)
        return made

    pair = BATCH * 8 * 64 / 2 + BATCH * 8 * CLASSES
    assert sent(DIVIDED, model) == pair
    check_trains_as_whole(images(model), "all_reduce", DIVIDED)


def test_a_process_builds_its_part_without_values() -> None:
    split = split_layers(images(), 0, divided(2))
    known = without_whole(images(), 0, split)
    assert isinstance(known, TensorModel)
    assert known.facts.obstacle == ""


def test_a_way_without_a_parameter_is_refused_with_its_reason() -> None:
    """A stage whose only layer is computed by every way: one way trains the layer, and the other has nothing."""
    with pytest.raises(
        ConfigurationError,
        match=r"every way must hold a parameter, got none for way 1 of stage 0, because no layer of the",
    ):
        make_split(images(), 0, Partition.parse("pipeline(4) * tensor(2)"))
