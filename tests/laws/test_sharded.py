"""Sharded parameters in virtual time: the gradient of the whole batch in shards, and the bytes that ZeRO counts."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from flockstep import registry
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.partitions.base import Partition
from flockstep.partitions.sharded import Sharded
from flockstep.records.events import NodeEvent, StepEvent
from flockstep.runtime.virtual_split import SplitSimulation
from flockstep.split import sharded_program
from flockstep.split.shards import ShardedModel
from flockstep.split.stages import MicroBatch
from flockstep.split.torch_shards import TorchUnit, shard_torch
from flockstep.workloads.models import squared_error
from support.split_jobs import GRADIENT, chain, check_trains_as_whole, job_of, simulated, tied

STRATEGIES = ("all_reduce", "local_sgd(period=2)", "ps(bsp, shards=2)")
FULL = pytest.mark.full
ITEMSIZE = 8
SIZES = [6 * 8 + 8, 8 * 8 + 8, 8 * 7 + 7, 7 * 5 + 5, 5 + 1]
"""Numbers of parameters of the layers of the chain."""


def frozen() -> nn.Module:
    """A chain whose second layer is not trained."""
    model = chain()
    model[2].requires_grad_(False)
    return model


class Residual(nn.Module):
    """A model that is traced: a layer that is added to its input, and one that is not in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.inner, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.LayerNorm(8)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        out: torch.Tensor = self.last(self.norm(x + torch.tanh(self.inner(x))))
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "tied": tied, "frozen": frozen, "traced": Residual}


@pytest.mark.parametrize(
    ("model", "strategy", "ways", "batch"),
    [
        ("chain", "ps(bsp, shards=2)", 3, 13),
        ("traced", "all_reduce", 2, 12),
        ("tied", "local_sgd(period=2)", 2, 12),
        *(
            pytest.param(model, strategy, ways, batch, marks=FULL)
            for model in MODELS
            for strategy in STRATEGIES
            for ways, batch in ((2, 13), (3, 12), (4, 12))
        ),
    ],
)
def test_shards_compute_the_unsplit_model(model: str, strategy: str, ways: int, batch: int) -> None:
    """The oracle is the unsplit model in float64. Of 13 samples the first of three ways computes 5."""
    job = job_of(MODELS[model], optimizer="sgd(lr=0.2, momentum=0.9)", batch=batch)
    check_trains_as_whole(job, strategy, f"sharded({ways})")


@pytest.mark.parametrize("ways", [2, 3, 4])
def test_a_way_sends_three_times_its_share(ways: int) -> None:
    """Two gathers and one scatter of (p - 1)/p K elements each, and p - 1 losses (Rajbhandari et al. 2020, 7.2).

    Layers whose parameters do not divide by p make the ways differ by less than 3 (p - 1) elements a layer.
    """
    steps = 4
    ran = simulated(job_of(), "all_reduce", f"sharded({ways})", replicas=1, steps=steps)
    sent = [e.sent_bytes / (steps * ITEMSIZE) for e in ran.events if isinstance(e, NodeEvent)]
    assert sum(sent) == 3 * (ways - 1) * sum(SIZES) + ways * (ways - 1)
    each = 3 * sum(SIZES) * (ways - 1) / ways + ways - 1
    assert all(abs(one - each) <= 3 * (ways - 1) * len(SIZES) for one in sent)
    messages = [e.messages_sent for e in ran.events if isinstance(e, NodeEvent)]
    assert messages == [steps * (ways - 1) * (3 * len(SIZES) + 1)] * ways


COLLECTIVES = [name for name in registry.names("collective") if name != "torch_distributed"]


@pytest.mark.parametrize(
    ("partition", "collective"),
    [
        ("sharded", "recursive_doubling"),
        ("tensor", "by_host"),
        *(pytest.param(one, name, marks=FULL) for one in ("sharded", "tensor") for name in COLLECTIVES),
    ],
)
def test_other_collectives_compute_the_same(partition: str, collective: str) -> None:
    """Every registered collective over messages, among four ways."""
    check_trains_as_whole(job_of(), "all_reduce", f"{partition}(4, collective={collective})")


@pytest.mark.parametrize("partition", ["sharded", "tensor"])
@pytest.mark.parametrize("inside", ["{}", "by_host(flat={})", "sparse(dense={})"])
def test_a_collective_of_the_whole_run_is_refused(partition: str, inside: str) -> None:
    """Ways are some of a run's processes, also if another collective hides one that connects all processes."""
    with pytest.raises(CompositionError, match=r"opens connections of its own .*; use collective=ring"):
        Partition.parse(f"{partition}(2, collective={inside.format('torch_distributed')})")


def test_a_way_computes_its_share_of_the_time() -> None:
    """On links that take no time a step of two ways takes half the seconds of a step of one worker."""
    whole, split = (simulated(job_of(), "all_reduce", name, replicas=1) for name in (None, "sharded(2)"))
    assert whole.simulation.now == pytest.approx(6 * GRADIENT)
    assert split.simulation.now == pytest.approx(6 * GRADIENT / 2)


def test_dropout_draws_as_the_micro_batches_of_a_pipeline_do() -> None:
    """Way w computes what micro-batch w computes in a pipeline whose stages are the units."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
        ).double()

    job = job_of(model)
    pipeline, split = simulated(job, "all_reduce", "pipeline(3, gpipe, 2)"), simulated(job, "all_reduce", "sharded(2)")
    np.testing.assert_allclose(split.result, pipeline.result, rtol=0, atol=1e-12)
    without = simulated(
        job_of(lambda: nn.Sequential(*(x for x in model() if not isinstance(x, nn.Dropout)))), "all_reduce"
    )
    assert np.abs(split.result - without.result).max() > 1e-3


@pytest.mark.parametrize("ways", [2, 3, 5])
def test_a_way_stores_its_shard_of_each_layer(ways: int) -> None:
    ran = simulated(job_of(optimizer="sgd(lr=0.2, momentum=0.9)"), "all_reduce", f"sharded({ways})", steps=1)
    assert isinstance(ran.simulation, SplitSimulation)
    model = ran.simulation.model
    assert isinstance(model, ShardedModel)
    for unit, size in enumerate(SIZES):
        held = [part.spans[unit].stop - part.spans[unit].start for part in model.parts]
        assert sum(held) == size
        assert max(held) - min(held) <= 1
    stored = [group.runners[0].node.params.size for group in ran.simulation.groups]
    assert stored == [part.schema.size for part in model.parts]
    assert sum(stored) == sum(SIZES)


def watched_units(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of memory in which gathered parameters and their gradients lie, at each forward or backward pass of a
    unit.
    """
    gc.collect()
    gc.freeze()  # each count looks for garbage among newer objects only
    alive, found = weakref.WeakSet[torch.Tensor](), list[int]()
    weights, forward, backward = TorchUnit._weights, TorchUnit.forward, TorchUnit.backward

    def made(self: TorchUnit, *given: Any) -> list[torch.Tensor]:
        tensors = weights(self, *given)
        for one in tensors:
            alive.add(one)
        return tensors

    def count() -> None:
        gc.collect()
        tensors = [one for weight in alive for one in (weight, weight.grad) if one is not None]
        memory = dict[int, int]()
        for one in tensors:
            begins = one.untyped_storage().data_ptr()
            memory[begins] = max(one.untyped_storage().nbytes(), memory.get(begins, 0))
        found.append(sum(memory.values()))

    def forwarded(self: TorchUnit, *given: Any) -> Any:
        outputs = forward(self, *given)
        count()
        return outputs

    def computed(self: TorchUnit, *given: Any) -> Any:
        count()
        return backward(self, *given)

    monkeypatch.setattr(TorchUnit, "_weights", made)
    monkeypatch.setattr(TorchUnit, "forward", forwarded)
    monkeypatch.setattr(TorchUnit, "backward", computed)
    return found


def test_a_run_gathers_one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are in this process: no more than two layers are in memory, once the model has been tried."""
    found = watched_units(monkeypatch)
    simulated(job_of(), "all_reduce", "sharded(2)", replicas=1, steps=2)
    trials = 2 * 3 * len(SIZES)  # passes over a batch, and over the part of each of two ways
    trial, run = found[:trials], found[trials:]
    assert min(SIZES) < max(run) / ITEMSIZE <= 2 * max(SIZES) < max(trial) / ITEMSIZE


def test_shares_of_the_batch_that_do_not_count_by_their_samples_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the mean of the ways' means is another gradient if their shares of the batch differ."""
    job = job_of(batch=13)
    whole = simulated(job, "all_reduce")

    def alike(replica: int, step: int, number: int, indices: np.ndarray, share: float) -> MicroBatch:
        return MicroBatch(replica, step, number, indices, 0.5)

    monkeypatch.setattr(sharded_program, "MicroBatch", alike)
    wrong = simulated(job, "all_reduce", "sharded(2)")
    assert np.abs(wrong.result - whole.result).max() > 1e-4


def test_losses_of_shards_are_added_in_more_than_half_precision() -> None:
    """Float16 counts no further than 65504."""

    def half() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)).half()

    def far(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return squared_error(outputs.float(), targets.float()) + 2e5

    job = dataclasses.replace(job_of(half), loss=far, data=lambda: halves(job_of().data()))
    losses = [e.loss for e in simulated(job, "all_reduce", "sharded(2)").events if isinstance(e, StepEvent)]
    assert losses == pytest.approx([2e5] * len(losses), rel=1e-3)


def halves(data: Data) -> Data:
    """The same data in float16."""
    return Data(data.train_x.astype(np.float16), data.train_y, data.test_x.astype(np.float16), data.test_y)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def normed_by_batch() -> nn.Module:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 4), norm, nn.Linear(4, 1)).double()


class Centered(nn.Module):
    """A layer of the user that subtracts the mean over the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


def centered() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), Centered(), nn.Linear(4, 1)).double()


class Keeper(nn.Linear):
    """A layer that leaves its weight where another layer finds it."""

    left: ClassVar[list[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left[:] = [self.weight.detach()]
        return super().forward(x)


class Finder(nn.Linear):
    """A layer that computes with what a `Keeper` has left."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + Keeper.left[0].mean()


def furtive() -> nn.Module:
    return nn.Sequential(Keeper(6, 4), Finder(4, 1)).double()


def summed(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs - targets) ** 2).sum()


@pytest.mark.parametrize(
    ("job", "ways", "reason"),
    [
        (lambda: job_of(normed), 2, r"buffers that change in training would differ between them, got '1.running_mean'"),
        (lambda: job_of(normed_by_batch), 2, r"each sample on its own, got BatchNorm1d in 1 of job 'chain'; use for"),
        (lambda: job_of(centered), 2, r"each sample on its own, got a loss of .* and a gradient at a distance of"),
        (lambda: job_of(furtive), 2, r"run one after another, must compute what the model computes, got a loss of nan"),
        (lambda: job_of(batch=2), 3, r"ways of sharded must be at most the 2 samples of a batch or micro-batch, got 3"),
        (
            lambda: job_of(lambda: nn.Linear(6, 1, bias=False).double()),
            7,
            r"got none for shard 5 in job 'chain', whose",
        ),
        (
            lambda: dataclasses.replace(job_of(), loss=summed),
            2,
            r"must be the mean over the .* use partition=none, or a",
        ),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(job: Callable[[], Job], ways: int, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        simulated(job(), "all_reduce", f"sharded({ways})")


class Autocast(nn.Module):
    """A layer of the user that computes in bfloat16 with float32 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


def in_bfloat16() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), Autocast())


def at_optimum() -> nn.Module:
    """A regression whose gradients cancel in the batch of the trial."""
    data, model = job_of().data(), nn.Linear(6, 1, bias=False).double()
    x, y = torch.tensor(data.train_x[::10]), torch.tensor(data.train_y[::10])
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    return nn.Sequential(model)


@pytest.mark.parametrize("model", [in_bfloat16, at_optimum])
def test_rounding_is_not_taken_for_a_layer_that_averages_over_the_batch(model: Callable[[], nn.Module]) -> None:
    def data() -> Data:
        known, dtype = job_of().data(), next(model().parameters()).detach().numpy().dtype
        return Data(*(one.astype(dtype) for one in (known.train_x, known.train_y, known.test_x, known.test_y)))

    assert len(shard_torch(dataclasses.replace(job_of(model), data=data), 0, Sharded(4)).parts) == 4


def test_a_batch_that_shrinks_below_the_ways_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flockstep.runtime.plan.Batches.next", lambda self, need: np.arange(1))
    with pytest.raises(
        ConfigurationError, match=r"ways of sharded must be at most the 1 samples of a batch or micro-batch, got 2"
    ):
        simulated(job_of(), "all_reduce", "sharded(2)")
