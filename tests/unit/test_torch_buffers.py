"""The tensors of a module that no optimizer trains, on several ranks in one process."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from flockstep.errors import ConfigurationError
from flockstep.runtime.torch_buffers import Buffers, Policy
from support.collectives import arrays, does

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")


class Model(nn.Module):
    """A frozen layer, and buffers of every kind, with values of its own for each rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.layer, self.frozen = nn.Linear(2, 2), nn.Linear(3, 50_000).requires_grad_(False)
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("frequencies", torch.randn(6, 20), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("count", torch.tensor(rank))
        self.register_buffer("limits", torch.tensor([-math.inf, math.nan]))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("scale", torch.full((1,), 1.0 + rank).expand(4))
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.register_buffer("rows", torch.eye(4).to_sparse_csr())
        self.register_buffer("waves", torch.randn(3, dtype=torch.complex64).view(1, 3).mT)
        self.register_buffer("cache", torch.randn(2 + rank), persistent=False)
        self.register_buffer("filled", torch.randn(2) if rank == 0 else None, persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("shared", self.mean)


def started(models: list[Model], policy: Policy | list[Policy] = "mean") -> list[Buffers]:
    """The buffers of each rank's model after the ranks have agreed on them."""
    policies: list[Policy] = policy if isinstance(policy, list) else [policy] * len(models)
    buffers = [Buffers(model, one) for model, one in zip(models, policies, strict=True)]
    does(lambda me, _: buffers[me.rank].take_first(me), arrays(len(models), 3))
    return buffers


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of a model but its trained parameters."""
    held = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    return held | dict(model.named_buffers())


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and np.array_equal(
        one.to_dense().numpy(), other.to_dense().numpy(), equal_nan=one.is_floating_point()
    )


def test_at_the_start_every_tensor_that_is_not_trained_is_rank_0_s() -> None:
    models = [Model(rank) for rank in range(3)]
    trained = [model.layer.weight.detach().clone() for model in models]
    started(models)
    expected = tensors(Model(0))
    for model, weight in zip(models, trained, strict=True):
        found = tensors(model)
        assert found.keys() == expected.keys()
        assert [name for name in found if not same(found[name], expected[name])] == []
        assert model.inner.shared is model.mean
        assert torch.equal(model.layer.weight, weight)


def test_local_buffers_stay_as_they_are_and_frozen_parameters_do_not() -> None:
    models = [Model(rank) for rank in range(2)]
    buffers = started(models, "local")
    expected = {**tensors(Model(1)), **{f"frozen.{name}": p for name, p in Model(0).frozen.named_parameters()}}
    assert [name for name, one in tensors(models[1]).items() if not same(one, expected[name])] == []
    assert not buffers[0].packed().size
    assert buffers[1].take({0: np.zeros(0, np.uint8), 1: np.zeros(0, np.uint8)}) == []


def sparse(model: Model) -> None:
    model.graph = model.graph * 2


def converted(model: Model) -> None:
    model.mean = model.mean.double()


def widened(model: Model) -> None:
    model.frozen = nn.Linear(4, 50_000).requires_grad_(False)


def lacking(model: Model) -> None:
    del model.count


def without_values(model: Model) -> None:
    model.mean = torch.empty(3, device="meta")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (sparse, r"graph .* cannot be copied from rank 0, where it is sparse_coo float32 \(4, 4\), to rank 1, where"),
        (
            converted,
            r"mean .* where it is strided float32 \(3,\), to rank 1, where it is strided float64 \(3,\); build",
        ),
        (
            widened,
            r"frozen.weight .* strided float32 \(50000, 3\), to rank 1, where it is strided float32 \(50000, 4\)",
        ),
        (
            lacking,
            r"count must be the same on all ranks .* int64 \(\), to rank 1, where it is missing; build the model",
        ),
        (without_values, r"values of mean must be comparable between ranks, got strided float32 on meta; give"),
    ],
)
def test_what_cannot_be_made_equal_is_refused_by_name(change: Callable[[Model], None], sentence: str) -> None:
    models = [Model(rank) for rank in range(2)]
    change(models[1])
    with pytest.raises(ConfigurationError, match=sentence):
        started(models)


def test_another_policy_on_rank_0_is_refused() -> None:
    """Otherwise the ranks would wait for each other forever."""
    with pytest.raises(ConfigurationError, match="got 'local' on rank 1 and 'mean' on rank 0; pass the same value"):
        started([Model(0), Model(1)], ["mean", "local"])


def test_at_the_end_buffers_are_averaged_unless_their_shape_has_changed() -> None:
    """A buffer that grows, as a memory of samples, stays each rank's own, and the others are averaged all the same."""
    models = [Model(rank) for rank in range(2)]
    buffers = started(models)
    with torch.no_grad():
        for rank, model in enumerate(models):
            model.mean += rank
            model.count += 5 + rank
            model.empty = torch.zeros(2 + rank, 4)
    own = models[0].mean.clone(), models[1].mean.clone()
    handed = {rank: each.packed() for rank, each in enumerate(buffers)}
    assert [each.take(handed) for each in buffers] == [["empty"], ["empty"]]
    for rank, model in enumerate(models):
        assert torch.equal(model.mean, (own[0].double() + own[1].double()).div(2).float())
        assert (int(model.count), len(model.empty)) == (5, 2 + rank)
        assert model.limits.isneginf().tolist() == [True, False]


def test_ranks_are_told_of_the_only_buffer_if_it_has_grown() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("bank", torch.zeros(0, 4))
    buffers = Buffers(model)
    model.bank = torch.zeros(3, 4)
    assert buffers.take({rank: buffers.packed() for rank in range(2)}) == ["bank"]
