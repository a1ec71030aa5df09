"""A network whose parameters have two dtypes, and a step of backward through it."""

from __future__ import annotations

import torch
from torch import nn


class Mixed(nn.Module):
    """Layers of one dtype around a norm of another."""

    def __init__(self, narrow: torch.dtype = torch.bfloat16, wide: torch.dtype = torch.float32, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8, dtype=narrow)
        self.norm = nn.LayerNorm(8, dtype=wide)
        self.last = nn.Linear(8, 2, dtype=narrow)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(torch.tanh(self.first(x.to(self.first.weight.dtype))).to(self.norm.weight.dtype))
        outputs: torch.Tensor = self.last(normed.to(self.last.weight.dtype)).to(torch.float32)
        return outputs


def backward(model: nn.Module, number: int) -> None:
    """Compute the gradients of the batch with the given number."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    (model(x) - x[:, :2]).square().mean().backward()
