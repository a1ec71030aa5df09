"""A job with frozen parameters and a buffer that stays, for replicas that PyTorch divides over processes."""

from __future__ import annotations

import torch
from torch import nn

import support.compiler  # noqa: F401
from flockstep.frameworks.base import Job
from support.split_jobs import chain, job_of


class Offset(nn.Module):
    """Adds a constant vector that is drawn when the model is built."""

    offset: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(width).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


def model() -> nn.Sequential:
    """The chain with its first layer frozen, and a constant behind its second layer."""
    layers = list(chain())
    layers[0].requires_grad_(requires_grad=False)
    return nn.Sequential(*layers[:4], Offset(8), *layers[4:])


def job() -> Job:
    """The regression of `split_jobs`."""
    return job_of(model)
