"""Small torch models, data for them, and a job made of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from flockstep.frameworks.base import Data, Job


class Attention(nn.Module):
    """A language model of one block, whose output layer is tied to its embedding."""

    def __init__(self, words: int = 11, width: int = 8, length: int = 6):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.register_buffer("place", torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.place
        b, t, d = h.shape
        q, k, v = self.qkv(self.norm(h)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h + self.mix(a.transpose(1, 2).reshape(b, t, d)))


class Frozen(nn.Module):
    """A frozen first layer, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)),
        nn.Conv2d(1, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


def word_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def classes(samples: int = 80) -> Data:
    random = np.random.default_rng(0)
    y = random.integers(4, size=samples)
    x = random.normal(size=(samples, 16)) + 2 * np.eye(4, 16)[y]
    return Data(x, y, x[:50], y[:50])


def words() -> Data:
    text = np.random.default_rng(0).integers(11, size=(60, 7))
    return Data(text[:, :-1], text[:, 1:], text[:20, :-1], text[:20, 1:])


def job(model: Callable[[], Any] = mlp, **changes: Any) -> Job:
    settings: dict[str, Any] = {"data": classes, "loss": F.cross_entropy, "optimizer": "sgd(lr=0.1)", "batch": 8}
    if model is Attention:
        settings |= {"data": words, "loss": word_loss}
    return Job(model, **(settings | changes))
