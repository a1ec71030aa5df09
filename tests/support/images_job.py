"""A small convolutional network on random images, for layers that are split over ways."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from flockstep.frameworks.base import Data, Job
from flockstep.workloads.models import cross_entropy

SIZE, CLASSES, BATCH = 8, 5, 12


def convolutional(after: Callable[[], nn.Module] = nn.Tanh) -> nn.Sequential:
    """Two convolutions with the layer `after` between them, and three fully connected layers, in float64."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), after(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 20), nn.Tanh(), nn.Linear(20, 9), nn.Tanh(), nn.Linear(9, CLASSES),
    ).double()  # fmt: skip


class Traced(nn.Module):
    """A convolutional network that is traced, with a residual connection among its convolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(36, 7), nn.ReLU(), nn.Linear(7, CLASSES))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = nn.functional.max_pool2d(x + torch.relu(self.second(x)), 2)
        out: torch.Tensor = self.head(x.flatten(1))
        return out


def images(
    model: Callable[[], nn.Module] = convolutional, batch: int = BATCH, optimizer: str = "sgd(lr=0.2, momentum=0.9)"
) -> Job:
    """A classification of 120 random images."""
    random = np.random.default_rng(0)
    x, y = random.standard_normal((160, 1, SIZE, SIZE)), random.integers(0, CLASSES, 160)
    return Job(
        model,
        lambda: Data(x[:120], y[:120], x[120:], y[120:]),
        optimizer,
        cross_entropy,
        lambda outputs, targets: float(cross_entropy(outputs, targets)),
        higher_is_better=False,
        batch=batch,
        name="images",
    )


def job() -> Job:
    """The job of this file, for runs of processes."""
    return images()
