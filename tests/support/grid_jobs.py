"""Small jobs over images, whose models have locally connected layers, convolutions and pooling."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from flockstep import LocallyConnected2d
from flockstep.frameworks.base import Data, Job
from flockstep.workloads.models import squared_error
from support.split_jobs import BATCH

HEIGHT, WIDTH, COLORS = 11, 9, 2


def local() -> nn.Sequential:
    """Two locally connected layers, the first with padding, the second with a stride of 2, and a pooling between."""
    torch.manual_seed(3)
    return nn.Sequential(
        LocallyConnected2d((HEIGHT, WIDTH), COLORS, 3, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(3, stride=1),
        LocallyConnected2d((HEIGHT - 2, WIDTH - 2), 3, 2, 3, stride=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(24, 1),
    ).double()


def mixed() -> nn.Sequential:
    """A convolution in groups, the largest of overlapping windows, and a locally connected layer."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(COLORS, 4, (3, 5), padding=(1, 2), groups=2),
        nn.Tanh(),
        nn.MaxPool2d(3, stride=2, padding=1),
        LocallyConnected2d((6, 5), 4, 3, 2),
        nn.Tanh(),
        nn.Conv2d(3, 2, 1, bias=False),
        nn.Flatten(),
        nn.Linear(40, 5),
        nn.Tanh(),
        nn.Linear(5, 1),
    ).double()


def normed() -> nn.Sequential:
    """A function of whole images, a convolution, and batch normalization behind a fully connected layer."""
    torch.manual_seed(5)
    begin, end = (nn.Softmax(1), nn.Conv2d(COLORS, 3, 4, stride=3)), (nn.Linear(18, 4), nn.BatchNorm1d(4), nn.Tanh())
    return nn.Sequential(*begin, nn.Tanh(), nn.Flatten(), *end, nn.Linear(4, 1)).double()


class Traced(nn.Module):
    """A model that is traced: two layers with a function between them, and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = LocallyConnected2d((HEIGHT, WIDTH), COLORS, 2, 4)
        self.second, self.inner, self.last = nn.Conv2d(2, 2, 3), nn.Linear(48, 48), nn.Linear(48, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return one number for each image."""
        x = torch.flatten(self.second(torch.tanh(self.first(x))), 1)
        out: torch.Tensor = self.last(x + torch.tanh(self.inner(x)))
        return out


def images_of(model: Callable[[], nn.Module], optimizer: str = "sgd(lr=0.2, momentum=0.9)") -> Job:
    """A regression on 120 random images."""
    random = np.random.default_rng(0)
    x = random.standard_normal((160, COLORS, HEIGHT, WIDTH))
    y = np.tanh(x.reshape(160, -1) @ random.standard_normal((COLORS * HEIGHT * WIDTH, 1)) / 8)
    return Job(
        model=model,
        data=lambda: Data(x[:120], y[:120], x[120:], y[120:]),
        optimizer=optimizer,
        loss=squared_error,
        metric=lambda outputs, targets: float(squared_error(outputs, targets)),
        higher_is_better=False,
        batch=BATCH,
        name="images",
    )


def job() -> Job:
    """The job of this file, for runs of processes."""
    return images_of(local)
