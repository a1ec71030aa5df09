"""A small network, and the loop of a script around it, for tests of what `flockstep.distribute` returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import flockstep
from flockstep.strategies.base import Strategy


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def start(
    strategy: str | Strategy = "all_reduce", model: nn.Module | None = None, lr: float = 0.1, momentum: float = 0.0
) -> tuple[Any, Any]:
    model = net() if model is None else model
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    return model, flockstep.distribute(model, sgd, strategy)


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    (model(x) - x[:, :2]).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def load(model: nn.Module, other: nn.Module) -> None:
    model.load_state_dict(other.state_dict())
