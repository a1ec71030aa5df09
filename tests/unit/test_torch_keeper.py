"""The state of a script's torch optimizer in a checkpoint."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.optimizers.sgd import SGD
from flockstep.runtime.torch_buffers import Buffers, Policy
from flockstep.runtime.torch_keeper import TorchKeeper


def test_parameters_without_a_state_in_the_checkpoint_have_none_afterwards() -> None:
    """A script may load a state before it is resumed; a parameter that had not been stepped begins without one."""
    model = nn.Linear(2, 1)
    flat, inner = FlatModule(model), torch.optim.Adam(model.parameters())
    keeper = TorchKeeper(flat, inner, Buffers(model), False, str, SGD)

    def step(bias: bool) -> None:
        model.weight.grad, model.bias.grad = torch.ones(1, 2), torch.ones(1) if bias else None
        inner.step()

    step(bias=False)
    kept = copy.deepcopy(keeper.at_boundary())
    step(bias=True)
    assert set(inner.state) == {model.weight, model.bias}
    keeper.restore_at_boundary(kept)
    assert set(inner.state) == {model.weight}
    assert inner.state[model.weight]["step"] == 1


def test_shards_that_lie_elsewhere_in_the_whole_model_are_refused() -> None:
    """Also if they have equal shapes, as halves of a square matrix have along either dimension."""
    model = nn.Linear(2, 1)
    keeper = TorchKeeper(FlatModule(model), torch.optim.SGD(model.parameters()), Buffers(model), False, str, SGD)
    kept = keeper.at_boundary()
    assert kept.layout is not None
    keeper.restore_at_boundary(kept)
    boxes = tuple(replace(box, whole=(4, *box.whole[1:])) for box in kept.layout.boxes)
    with pytest.raises(ConfigurationError, match="the script shards its model in another way than the script that"):
        keeper.restore_at_boundary(replace(kept, layout=replace(kept.layout, boxes=boxes)))


def test_a_sharded_state_of_another_shape_than_its_parameter_is_not_saved() -> None:
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters())
    keeper = TorchKeeper(FlatModule(model), inner, Buffers(model), False, str, SGD)
    row: Any = torch.zeros(4)
    row._local_tensor = torch.zeros(2)  # as a DTensor has it
    inner.state[model.weight] = {"row": row}
    with pytest.raises(
        ConfigurationError, match=r"the state row of torch\.optim\.sgd\.SGD is a DTensor of another shape"
    ):
        keeper.at_boundary()


class Averaged(nn.Module):
    """A layer with a running mean that `state_dict` leaves out, and a cache that grows with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.cache = torch.arange(float(len(x)))
        out: torch.Tensor = self.layer(self.norm(x) - self.mean) + self.cache[:, None]
        return out


@pytest.mark.parametrize("policy", ["mean", "local"])
def test_all_buffers_are_restored_also_those_that_a_state_dict_leaves_out(policy: Policy) -> None:
    torch.manual_seed(0)
    x, model, resumed = torch.rand(4, 3), Averaged(), Averaged()
    keepers = []
    for one in (model, resumed):
        inner = torch.optim.SGD(one.parameters(), lr=0.1)
        keepers.append(TorchKeeper(FlatModule(one), inner, Buffers(one, policy), False, str, SGD))
    model(x)
    resumed.load_state_dict(model.state_dict())
    kept = copy.deepcopy(keepers[0].between_steps())
    keepers[1].restore_between_steps(kept, random=False)
    assert torch.equal(resumed.eval()(x), model.eval()(x))
    model.train()(x[:2])
    assert len(resumed.cache) == 4


def test_a_buffer_of_the_state_dict_that_has_grown_is_restored() -> None:
    model = Averaged()
    Buffers(model).restore_values(Buffers(model).values() | {"norm.running_mean": torch.ones(4)})
    assert model.norm.running_mean.tolist() == [1.0] * 4


@pytest.mark.parametrize("kept", [{}, {"norm.running_mean": torch.zeros(3)}])
def test_a_checkpoint_without_a_buffer_of_the_state_dict_is_refused(kept: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ConfigurationError, match=r"buffer norm\.\w+ is in the script only, and not in the checkpoint"):
        Buffers(Averaged()).restore_values(kept)


class Lazy(nn.Module):
    """A layer whose first forward pass fills a cache, in a module inside too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(3, 2), nn.Module()
        self.register_buffer("mask", None, persistent=False)
        self.register_buffer("scale", torch.ones(1).expand(3), persistent=False)
        self.inside.register_buffer("mask", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = (x.mean(0) > 0.5).float()
            self.inside.mask = torch.rand(2)
            self.scale = self.scale * x.mean(0)
        out: torch.Tensor = self.layer(x * self.mask * self.scale) + self.inside.mask
        return out


def test_a_cache_that_the_first_forward_pass_fills_is_restored() -> None:
    torch.manual_seed(0)
    x, model, resumed = torch.rand(4, 3), Lazy(), Lazy()
    model(x)
    resumed.load_state_dict(model.state_dict())
    values = {name: one.clone() for name, one in Buffers(model).values().items()}
    Buffers(resumed).restore_values(values)
    assert torch.equal(resumed(1 - x), model(1 - x))
    assert resumed.state_dict().keys() == model.state_dict().keys()
    resumed.mask.zero_()
    assert torch.equal(values["mask"], model.mask), "the buffer has its own memory"


def test_a_checkpoint_with_a_buffer_that_the_script_does_not_register_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"buffer norm.other is in the checkpoint only, and not in the script"):
        Buffers(Averaged()).restore_values(Buffers(Averaged()).values() | {"norm.other": torch.zeros(4)})


def test_an_expanded_buffer_takes_other_values() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.ones(1).expand(3))
    Buffers(model).restore_values({"mask": torch.arange(3.0)})
    assert model.mask.tolist() == [0.0, 1.0, 2.0]
