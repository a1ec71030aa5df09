"""The job of `preemption.py`: `digits`, with a model that takes a given time at least for a step."""

from __future__ import annotations

import dataclasses
import time

import torch
from torch import nn

from flockstep import Job
from flockstep.optimizers.sgd import SGD
from flockstep.workloads.digits import Digits

LR = 0.03
"""A quarter of the workload's learning rate: about 300 steps to an accuracy of 0.95."""


class Paced(nn.Module):
    """A model whose forward pass in training takes at least `seconds`, in which the process sleeps."""

    def __init__(self, model: nn.Module, seconds: float):
        super().__init__()
        self.model, self.seconds = model, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the model."""
        if torch.is_grad_enabled():
            time.sleep(self.seconds)
        found: torch.Tensor = self.model(x)
        return found


def paced(seconds: float) -> Job:
    """The job, with steps of at least `seconds`."""
    digits = Digits().job(0)
    return dataclasses.replace(digits, model=lambda: Paced(digits.model(), seconds), optimizer=SGD(lr=LR))
