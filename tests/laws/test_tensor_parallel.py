"""Layers split over ways, in virtual time: gradients of the unsplit model, exact bytes, times, copies of equal bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flockstep
from flockstep.errors import ConfigurationError, FlockstepError, PeerLost
from flockstep.frameworks.base import Data, Job
from flockstep.partitions.tensor import TensorParallel
from flockstep.records.events import NodeEvent, StepEvent
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.split.stages import MicroBatch
from flockstep.split.tensor_program import TensorWay
from flockstep.split.torch_blocks import VocabularyOfInputs, VocabularyOfOutputs
from flockstep.split.torch_ways import TorchWay, split_layers
from flockstep.split.ways import WayWeights
from support.split_jobs import BATCH, GRADIENT, chain, check_trains_as_whole, job_of, simulated

STRATEGIES = ("all_reduce", "local_sgd(period=2)", "ps(bsp, shards=2)")
FULL = pytest.mark.full
WORDS, LENGTH, WIDTH = 11, 5, 8


def language_model(norm_first: bool = True, dropout: float = 0.0) -> Callable[[], nn.Module]:
    """Two layers of attention with four heads, between an embedding and a layer before a cross entropy."""

    def model() -> nn.Module:
        torch.manual_seed(5)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 12, dropout, batch_first=True, norm_first=norm_first, activation=kind)
            for kind in ("relu", "gelu")
        ]
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)).double()

    return model


def words_of(model: Callable[[], nn.Module], optimizer: str = "sgd(lr=0.2, momentum=0.9)") -> Job:
    """The next word of random sentences, of which every second word repeats the one before."""
    words = np.random.default_rng(1).integers(0, WORDS, (80, LENGTH + 1))
    words[:, 1::2] = words[:, ::2]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(loss(outputs, targets))

    x, y = words[:, :-1], words[:, 1:]
    data = Data(x[:60], y[:60], x[60:], y[60:])
    return Job(model, lambda: data, optimizer, loss, metric, higher_is_better=False, batch=BATCH, name="words")


def normed() -> nn.Module:
    """A chain with batch normalization, in which one pair of layers can be split."""
    torch.manual_seed(4)
    first, second, third = nn.Linear(6, 9), nn.Linear(9, 7), nn.Linear(7, 1)
    return nn.Sequential(first, nn.Tanh(), second, nn.BatchNorm1d(7), nn.Tanh(), third).double()


class Traced(nn.Module):
    """A model that is traced: a pair of layers with a function between them, a residual connection, another pair."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.second, self.inner = nn.Linear(6, 9), nn.Linear(9, 7), nn.Linear(7, 7)
        self.head = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.tanh(self.first(x)))
        out: torch.Tensor = self.head(x + torch.tanh(self.inner(x)))
        return out


JOBS = {
    "traced": lambda: job_of(Traced, optimizer="sgd(lr=0.2, momentum=0.9)"),
    "chain": lambda: job_of(chain, optimizer="sgd(lr=0.2, momentum=0.9)"),
    "batch normalization": lambda: job_of(normed),
    "norms first": lambda: words_of(language_model()),
    "norms last": lambda: words_of(language_model(norm_first=False)),
}


PRODUCTS = (
    "pipeline(2, 1f1b, 3) * tensor(2)",
    "tensor(2) * pipeline(2, interleaved(2), 4)",
    "pipeline(2, zb_h1, 4) * tensor(2)",
    "pipeline(2, gpipe, 3) * tensor(2)",
)


@pytest.mark.parametrize(
    ("job", "strategy", "partition"),
    [
        ("chain", "ps(bsp, shards=2)", "tensor(3)"),
        ("traced", "all_reduce", "tensor(2)"),
        ("batch normalization", "all_reduce", "tensor(2)"),
        ("norms first", "local_sgd(period=2)", "tensor(3)"),
        ("chain", "local_sgd(period=2)", PRODUCTS[0]),
        ("norms first", "all_reduce", PRODUCTS[2]),
        *(
            pytest.param(job, strategy, partition, marks=FULL)
            for job in JOBS
            for strategy in STRATEGIES
            for partition in ("tensor(2)", "tensor(4)", *(PRODUCTS if "batch" not in job else ()))
        ),
    ],
)
def test_split_layers_compute_the_unsplit_model(job: str, strategy: str, partition: str) -> None:
    """The oracle is the unsplit model in float64: parameters, losses and evaluations, with its running statistics."""
    check_trains_as_whole(JOBS[job](), strategy, partition)


class Block(nn.Module):
    """A layer that writes to its inputs before it multiplies them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x))
        return out


@pytest.mark.parametrize("partition", ["tensor(2)", "pipeline(2, 1f1b, 2, (5,))"])
def test_the_first_layer_behind_a_message_may_work_in_place(partition: str) -> None:
    def model() -> nn.Module:
        torch.manual_seed(4)
        pair = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8, bias=False)
        return nn.Sequential(*pair, nn.ReLU(inplace=True), nn.Linear(8, 8), Block(), nn.Linear(8, 1)).double()

    check_trains_as_whole(job_of(model), "all_reduce", partition)


def test_pairs_of_a_traced_model_are_split() -> None:
    """Both pairs, with a function and with a module between them; the residual connection is computed by every way."""
    split = split_layers(job_of(Traced), 0, TensorParallel(2))
    names = [entry.name for part in split.parts for entry in part.schema.entries]
    halves = {
        name.removesuffix(f" (part {part})") for part in (0, 1) for name in names if name.endswith(f"(part {part})")
    }
    assert halves == {f"{one}.weight" for one in ("first", "second", "head.0", "head.2")} | {
        "first.bias",
        "head.0.bias",
    }
    assert sum(split.sizes) == sum(one.numel() for one in Traced().parameters())


@pytest.mark.parametrize("left_out", ["forward", "backward"])
def test_a_sum_that_is_left_out_is_noticed(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, noticed before the run: the first sum of a step, or its last, is the term of the own way."""
    add, count = TensorWay._sum, defaultdict[TensorWay, int](int)

    async def alone(self: TensorWay, term: Any) -> Any:
        if term is None:
            return None
        count[self] += 1
        return term if count[self] % 3 == (left_out == "forward") else await add(self, term)

    monkeypatch.setattr(TensorWay, "_sum", alone)
    with pytest.raises(ConfigurationError, match="split over 2 ways, must compute what the model computes, got a loss"):
        simulated(job_of(), "all_reduce", "tensor(2)")
    assert set(count.values()) == {3}


def test_layers_that_do_not_compute_the_model_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison before a run: a way that forgets the elementwise function between a pair."""
    monkeypatch.setattr("flockstep.split.torch_blocks.ELEMENTWISE", (nn.Tanh, nn.Softmax))
    split_layers(job_of(), 0, TensorParallel(2))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Softmax(-1), nn.Linear(8, 1)).double()

    with pytest.raises(ConfigurationError, match="split over 2 ways, must compute what the model computes, got a loss"):
        split_layers(job_of(model), 0, TensorParallel(2))


@pytest.mark.parametrize("strategy", ["easgd(period=2, alpha=0.3)", pytest.param("ps(asynchronous)", marks=FULL)])
def test_all_ways_compute_with_the_same_bits_of_what_they_share(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of an asynchronous strategy sum in different orders, but a replicated layer belongs to only one group."""
    seen: dict[tuple[int, int], set[bytes]] = defaultdict(set)
    forward = TorchWay.forward

    def watched(self: TorchWay, chunk: int, block: int, weights: WayWeights, batch: MicroBatch, given: Any) -> Any:
        seen[batch.replica, batch.step].add(b"".join(one.tobytes() for one in weights.copied))
        return forward(self, chunk, block, weights, batch, given)

    monkeypatch.setattr(TorchWay, "forward", watched)
    compute, network = "lognormal(0.012, 0.5)", "1gbit"
    ran = simulated(job_of(), strategy, "tensor(3)", replicas=3, compute=compute, network=network)
    assert len(seen) == 3 * 6
    assert {len(held) for held in seen.values()} == {1}
    assert len({next(iter(held)) for held in seen.values()}) > 6, "they change"
    losses: dict[tuple[int, int], set[float | None]] = defaultdict(set)
    for event in ran.events:
        if isinstance(event, StepEvent):
            losses[event.rank // 3, event.step].add(event.loss)
    assert {len(each) for each in losses.values()} == {1}


def ring_elements(ways: int, size: int, rank: int) -> int:
    """Elements that a rank sends in a ring all-reduce: every chunk twice, except two."""
    chunks = [size // ways + (c < size % ways) for c in range(ways)]
    return sum(chunks[(rank - hop) % ways] + chunks[(rank - hop + 1) % ways] for hop in range(ways - 1))


@pytest.mark.parametrize("ways", [2, 3])
def test_exactly_one_sum_of_a_pair_of_layers_in_each_pass(ways: int) -> None:
    """Forward the outputs of both pairs, 8 and 5 numbers a sample; backward the inputs of the second pair, 8 numbers.

    In addition each way passes on, once around the ring, the 19 parameters that every way computes with: two biases
    and the last layer.
    """
    steps = 6
    ran = simulated(job_of(), "local_sgd(period=100)", f"tensor({ways})", replicas=1, steps=steps)
    simulation = ran.simulation
    assert isinstance(simulation, SplitSimulation)
    copied = [len(part.copied(part.initial())) for part in simulation.model.parts]
    assert sum(copied) == 8 + 5 + 5 + 1
    events = sorted((e for e in ran.events if isinstance(e, NodeEvent)), key=lambda e: e.node)
    for way, event in enumerate(events):
        sums = sum(ring_elements(ways, BATCH * width, way) for width in (8, 5, 8))
        copies = sum(copied) - copied[(way + 1) % ways]
        assert event.sent_bytes == steps * 8 * (sums + copies)
        assert event.messages_sent == steps * (3 * 2 * (ways - 1) + ways - 1)


def test_the_first_layers_of_a_transformer_need_no_sum_backward() -> None:
    """An embedding, two layers of attention and two of perceptrons: five sums forward, and one of four numbers a word
    for the loss of three ways; backward four of the layers and one of the last layer.
    """
    ran = simulated(words_of(language_model()), "local_sgd(period=100)", "tensor(3)", replicas=1, steps=1)
    simulation = ran.simulation
    assert isinstance(simulation, SplitSimulation)
    size, copied = BATCH * LENGTH, [len(part.copied(part.initial())) for part in simulation.model.parts]
    for event in (e for e in ran.events if isinstance(e, NodeEvent)):
        sums = 10 * ring_elements(3, size * WIDTH, event.node) + ring_elements(3, size * 4, event.node)
        assert event.sent_bytes == 8 * (sums + sum(copied) - copied[(event.node + 1) % 3])


def test_the_seconds_of_a_step_are_those_of_its_passes_and_sums() -> None:
    """Two ways of 16 units each: half of the work, and three ring all-reduces of two messages on the critical path."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Linear(a, b, bias=False) for a, b in pairwise((6, 32, 12, 32, 1))]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], layers[2], nn.Tanh(), layers[3]).double()

    facts: dict[str, Any] = {"replicas": 1, "steps": 4}
    free = simulated(job_of(model), "local_sgd(period=100)", "tensor(2)", **facts)
    assert free.simulation.now == pytest.approx(4 * GRADIENT / 2)
    shared = simulated(job_of(model), "local_sgd(period=100)", "tensor(2)", network="link('1gbit', '1ms')", **facts)
    sums = sum(2 * (1e-3 + (BATCH * width * 8 / 2 + 64) * 8 / 1e9) for width in (12, 1, 12))
    assert shared.simulation.now == pytest.approx(4 * (GRADIENT / 2 + sums))


def test_dropout_is_equal_where_the_ways_compute_alike_and_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of all ways are equal only if the dropout behind the sum is; that of hidden units has a stream per way."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        pair = nn.Linear(6, 64), nn.Dropout(0.5), nn.Linear(64, 16)
        return nn.Sequential(*pair, nn.Dropout(0.5), nn.Linear(16, 1)).double()

    masks: dict[int, list[bytes]] = defaultdict(list)
    forward = nn.Dropout.forward

    def watched(self: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
        found = forward(self, x)
        masks[x.shape[-1]].append((found == 0).numpy().tobytes())
        return found

    monkeypatch.setattr(nn.Dropout, "forward", watched)
    split_layers(job_of(model), 0, TensorParallel(2))
    masks.clear()
    ran = simulated(job_of(model), "local_sgd(period=100)", "tensor(2)", replicas=1, steps=5)
    hidden = [one for one in masks[32] if one.count(1)]
    assert len(set(hidden)) == 10, "each way and step has a mask of its own"
    losses = defaultdict(set)
    for event in ran.events:
        if isinstance(event, StepEvent):
            losses[event.step].add(event.loss)
    assert [len(each) for each in losses.values()] == [1] * 5
    again = simulated(job_of(model), "local_sgd(period=100)", "tensor(2)", replicas=1, steps=5, network="1gbit")
    assert again.result.tobytes() == ran.result.tobytes(), "whatever the times"


@pytest.mark.parametrize("word", [-1, 10])
def test_a_word_that_a_split_embedding_does_not_have_is_refused(word: int) -> None:
    """torch's embedding refuses it too; no way has the word, so that all terms would be zero."""
    split, x = VocabularyOfInputs("words", nn.Embedding(10, 2), 3), torch.tensor([[0, word]])
    for way in range(3):
        weights = {"words": split.parameters["words"][split.spans[way]]}
        split.term(way, x.clamp(0, 9), weights, x)
        with pytest.raises(ConfigurationError, match="embedding words must be from 0 to 9, got "):
            split.term(way, x, weights, x)


def test_the_cross_entropy_over_a_split_vocabulary() -> None:
    """From log-sum-exps and outputs of the targets, against torch's cross entropy of all outputs."""
    torch.manual_seed(0)
    layer, x, targets = nn.Linear(7, 10).double(), torch.randn(6, 7).double(), torch.arange(6) % 10
    split = VocabularyOfOutputs("last", layer, 3)
    terms = []
    for way in range(3):
        places = {role: torch.from_numpy(split.places(role, way)) for role in split.parameters}
        weights = {role: split.parameters[role].reshape(-1)[at] for role, at in places.items()}
        terms.append(split.term(way, 100 * x, weights, targets))
    expected = nn.functional.cross_entropy(layer(100 * x), targets)
    assert split.cross_entropy(sum(terms)).item() == pytest.approx(expected.item(), rel=1e-13)
    with pytest.raises(ConfigurationError, match="must be classes from 0 to 9, got -100 to 5"):
        split.term(0, x, weights, torch.tensor([0, 1, 2, -100, 4, 5]))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=1999),
        nn.CrossEntropyLoss(weight=(1 + torch.arange(2000) // BATCH).double()),
    ],
)
def test_no_class_of_a_split_cross_entropy_is_untried(loss: nn.Module) -> None:
    """The batch with which the parts are compared has none of the classes that the loss treats differently."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((60, 6)), random.integers(0, BATCH, 60)
    job = Job(
        lambda: nn.Sequential(nn.Linear(6, 2000)).double(), lambda: Data(x, y, x, y), "sgd(lr=0.1)", loss, batch=BATCH
    )
    with pytest.raises(ConfigurationError, match="no layer of the model of job 'job' can be split over 2 ways"):
        split_layers(job, 0, TensorParallel(2))


@pytest.mark.parametrize(
    ("loss", "split"),
    [
        (nn.CrossEntropyLoss(), True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), False),
        (nn.CrossEntropyLoss(ignore_index=3), False),
        (nn.CrossEntropyLoss(weight=torch.arange(1, 11).double()), False),
    ],
)
def test_only_a_plain_cross_entropy_is_split(loss: nn.Module, split: bool) -> None:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((60, 6)), random.integers(0, 2, 60)
    job = Job(
        lambda: nn.Sequential(nn.Linear(6, 10)).double(), lambda: Data(x, y, x, y), "sgd(lr=0.1)", loss, batch=BATCH
    )
    if split:
        assert len(split_layers(job, 0, TensorParallel(2)).parts[0].shares[0]) == 2
    else:
        with pytest.raises(ConfigurationError, match="no layer of the model of job 'job' can be split over 2 ways"):
            split_layers(job, 0, TensorParallel(2))


def test_a_way_that_dies_takes_its_replica_with_it() -> None:
    ran = simulated(job_of(), "ps(asynchronous)", "tensor(2)", replicas=2, steps=8, faults=("dies(3, '30ms')",))
    steps = {rank: max(e.step for e in ran.events if isinstance(e, StepEvent) and e.rank == rank) for rank in range(4)}
    assert steps[0] == steps[1] == 8
    assert steps[2] < 8
    with pytest.raises(PeerLost, match="worker 3 died at step"):
        simulated(job_of(), "all_reduce", "tensor(2)", replicas=2, steps=8, faults=("dies(3, '30ms')",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partition": "tensor(1)"}, "ways of tensor must be >= 2, got 1; use partition=none"),
        ({"partition": "tensor(2) * tensor(2)"}, r"tensor\(ways=2\) \* tensor.*; only a pipeline and a tensor can be"),
        ({"partition": "tensor(2) * none"}, "only a pipeline and a tensor can be multiplied, as in"),
        ({"workers": 3}, "must be a multiple of 2 for tensor"),
        (
            {"job": "charlm"},
            "no layer of the model of job 'charlm' can be split over 2 ways, got traced operations, Lay",
        ),
        ({"job": "mnist1d", "partition": "tensor(30)", "workers": 30}, "no layer of .* can be split over 30 ways, got"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    facts: dict[str, Any] = {"job": "digits", "partition": "tensor(2)", "workers": 2, **given}
    with pytest.raises(FlockstepError, match=message):
        flockstep.simulate(facts.pop("job"), "all_reduce", steps=1, out=tmp_path, **facts)


def test_a_digits_network_is_saved_as_the_unsplit_model(tmp_path: Path) -> None:
    """Its convolutions are computed by every way, its two fully connected layers are split."""
    runs = {"split": ("tensor(2)", 4), "whole": (None, 2)}
    saved = {
        name: flockstep.simulate(
            "digits(batch=8)", "ps(bsp)", workers=workers, partition=partition, steps=3, out=tmp_path / name
        )
        for name, (partition, workers) in runs.items()
    }
    split, whole = saved["split"].parameters(), saved["whole"].parameters()
    np.testing.assert_allclose(split[0], whole[0], atol=1e-6)
    assert split[1] == whole[1]
    assert saved["split"].summary.workers == 4
    assert saved["split"].summary.replicas_agree


@pytest.mark.parametrize("partition", ["pipeline(2, pipedream, 1, (4,)) * tensor(2)"])
def test_ways_of_an_asynchronous_pipeline_use_its_versions(partition: str) -> None:
    """The delays are those of the pipeline without ways; negative control: they are not those of plain descent."""
    facts: dict[str, Any] = {"replicas": 1, "steps": 8}
    alone = simulated(job_of(), "all_reduce", partition.partition(" *")[0], **facts)
    split = simulated(job_of(), "all_reduce", partition, **facts)
    np.testing.assert_allclose(split.result, alone.result, rtol=0, atol=1e-12)
    assert np.abs(split.result - simulated(job_of(), "all_reduce", **facts).result).max() > 1e-3


def test_the_bytes_of_a_product_are_those_of_its_factors() -> None:
    """Each way passes the whole activations on, and sums within its stage: 8 numbers forward in the first, 5 forward
    and 8 backward in the second, whose split layers begin with the outputs of the first.
    """
    ran = simulated(job_of(), "local_sgd(period=100)", "pipeline(2, gpipe, 1, (4,)) * tensor(2)", replicas=1, steps=1)
    simulation = ran.simulation
    assert isinstance(simulation, SplitSimulation)
    copied = [len(part.copied(part.initial())) for part in simulation.model.parts]
    assert sum(copied[:2]) == 8
    assert sum(copied[2:]) == 5 + 5 + 1
    sums = [BATCH * 8, BATCH * (5 + 8)]
    passed = [BATCH * 8, BATCH * 8]
    for event in (e for e in ran.events if isinstance(e, NodeEvent)):
        stage = event.node // 2
        assert event.sent_bytes == 8 * (sums[stage] + passed[stage] + copied[event.node])
