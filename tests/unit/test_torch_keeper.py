"""The state of a script's torch optimizer in a checkpoint."""

from __future__ import annotations

import copy

import torch
from torch import nn

from flockstep.drivers.torch_buffers import Buffers
from flockstep.drivers.torch_keeper import TorchKeeper
from flockstep.frameworks.torch_flat import FlatModule


def test_parameters_without_a_state_in_the_checkpoint_have_none_afterwards() -> None:
    """A script may load a state before it is resumed; a parameter that had not been stepped begins without one."""
    model = nn.Linear(2, 1)
    flat, inner = FlatModule(model), torch.optim.Adam(model.parameters())
    keeper = TorchKeeper(flat, inner, Buffers(model), False, lambda: False)

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
