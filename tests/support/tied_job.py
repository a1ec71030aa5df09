"""A small language model in float64 whose output layer has the weights of the embedding, for split runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flockstep.frameworks.base import Data, Job
from flockstep.workloads.models import Transformer

WORDS, LENGTH, WIDTH = 11, 5, 8


def model(tied: bool = True) -> torch.nn.Module:
    """Two layers of attention, between an embedding and the same embedding."""
    torch.manual_seed(5)
    return Transformer(WORDS, LENGTH, WIDTH, 2, 2, tied).double()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next words."""
    return torch.nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def metric(outputs: Tensor, targets: Tensor) -> float:
    """Return the loss as a number."""
    return float(loss(outputs, targets))


def job() -> Job:
    """The next word of random sentences, of which every second word repeats the one before."""
    words = np.random.default_rng(1).integers(0, WORDS, (80, LENGTH + 1))
    words[:, 1::2] = words[:, ::2]
    x, y = words[:, :-1], words[:, 1:]
    data = Data(x[:60], y[:60], x[60:], y[60:])
    options = {"higher_is_better": False, "batch": 12, "name": "tied words"}
    return Job(model, lambda: data, "sgd(lr=0.2, momentum=0.9)", loss, metric, **options)
