"""A job whose model is a small transformer, and jobs for runs of processes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import support.compiler  # noqa: F401
from flockstep.frameworks.base import Data, Job
from support.split_jobs import BATCH

WORDS, LENGTH, WIDTH = 11, 5, 8


def language_model(norm_first: bool = True, dropout: float = 0.0) -> Callable[[], nn.Module]:
    """Two layers of attention with four heads, between an embedding and a layer before a cross entropy."""

    def model() -> nn.Module:
        torch.manual_seed(5)
        layers = [
            nn.TransformerEncoderLayer(WIDTH, 4, 12, dropout, batch_first=True, norm_first=norm_first, activation=kind)
            for kind in ("relu", "gelu")
        ]
        return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)).double()

    return model


def words_of(model: Callable[[], nn.Module], optimizer: str = "sgd(lr=0.2, momentum=0.9)") -> Job:
    """The next word of random sentences, of which every second word repeats the one before."""
    words = np.random.default_rng(1).integers(0, WORDS, (80, LENGTH + 1))
    words[:, 1::2] = words[:, ::2]

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        return float(loss(outputs, targets))

    x, y = words[:, :-1], words[:, 1:]
    data = Data(x[:60], y[:60], x[60:], y[60:])
    return Job(model, lambda: data, optimizer, loss, metric, higher_is_better=False, batch=BATCH, name="words")


def job() -> Job:
    """The transformer, with dropout, for runs of processes."""
    return words_of(language_model(dropout=0.0))
