"""The networks of the built-in workloads; importing this module imports torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 -- what every user of torch calls it
from torch import Tensor, nn

from flockstep.frameworks.torch_kinds import register_kind
from flockstep.frameworks.torch_local import LocallyConnected2d

MEAN_PIXEL = 0.3
"""Approximate mean of the digits' pixels, which the first layer would otherwise learn in fifty steps."""


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """Return `build()`, called with torch's random numbers seeded; the caller's random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy in nats, for outputs of shape (..., classes) and targets of shape (...)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def nats_per_character(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean cross entropy in nats as a number, for use as a metric."""
    return float(cross_entropy(outputs, targets))


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of outputs and targets of the same shape."""
    return F.mse_loss(outputs, targets)


def relative_squared_error(outputs: Tensor, targets: Tensor) -> float:
    """Return the mean squared error as a number. For targets of variance 1, the error is relative to their variance."""
    return float(squared_error(outputs, targets))


def image_network(seed: int, hidden: int, local: bool) -> nn.Module:
    """Return a network for images with two layers of 3 × 3 filters and two fully connected layers: pixels (batch, 1, 8,
    8) in [0, 1] → logits (batch, 10).

    With 240 hidden units, the network has 38,170 parameters. If `local`, the filters differ between places, and the
    network has 17,626 parameters.
    """

    def build() -> nn.Module:
        layers: list[nn.Module] = [Shift(-MEAN_PIXEL)]
        channels = (1, 4, 8) if local else (1, 16, 32)
        for size, (before, after) in zip((8, 4), itertools.pairwise(channels), strict=True):
            kind = partial(LocallyConnected2d, (size, size)) if local else nn.Conv2d
            layers += [kind(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Flatten(), nn.Linear(4 * channels[-1], hidden), nn.ReLU(), nn.Linear(hidden, 10)]
        return he_initialized(nn.Sequential(*layers))

    return seeded(seed, build)


def signal_cnn(seed: int) -> nn.Module:
    """Return a CNN for signals: (batch, 1, 40) → logits (batch, 10), with 28,030 parameters."""

    def build() -> nn.Module:
        layers: list[nn.Module] = []
        for before, after, width in ((1, 32, 5), (32, 64, 3), (64, 64, 3)):
            layers += [nn.Conv1d(before, after, width, padding=width // 2), nn.ReLU(), nn.MaxPool1d(2)]
        layers += [nn.Flatten(), nn.Linear(64 * 5, 28), nn.ReLU(), nn.Linear(28, 10)]
        return he_initialized(nn.Sequential(*layers))

    return seeded(seed, build)


def perceptron(seed: int, inputs: int, width: int, depth: int) -> nn.Module:
    """Return a perceptron: inputs (batch, inputs) → `depth` layers of `width` tanh units → (batch, 1)."""

    def build() -> nn.Module:
        sizes = [inputs] + [width] * depth
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(sizes):
            layers += [nn.Linear(before, after), nn.Tanh()]
        network = nn.Sequential(*layers, nn.Linear(width, 1))
        for layer in network:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
                nn.init.zeros_(layer.bias)
        return network

    return seeded(seed, build)


def he_initialized(network: nn.Sequential) -> nn.Sequential:
    """Initialize the weights of `network` as in He et al. (2015), set biases to zero, and scale the last layer by
    0.1.

    With torch's own smaller weights, these networks stay on a plateau for the first hundred steps.
    """
    weights = [layer for layer in network if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Linear, LocallyConnected2d))]
    for layer in weights:
        if isinstance(layer, LocallyConnected2d):
            nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.weight[0, 0, 0].numel()))
        else:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
    with torch.no_grad():
        weights[-1].weight.mul_(0.1)
    return network


class Shift(nn.Module):
    """A layer that adds a constant to its input."""

    def __init__(self, amount: float) -> None:
        super().__init__()
        self.amount = amount

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` plus the layer's constant, in the shape of `x`."""
        return x + self.amount


register_kind(Shift)


class Transformer(nn.Module):
    """A decoder-only language model (Radford et al. 2019) without biases; if `tied`, the output layer reuses the
    embedding.

    The model uses plain matrix products, which `torch.func.vmap` can batch over replicas.
    """

    def __init__(self, symbols: int, context: int, width: int, layers: int, heads: int, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Parameter(0.1 * torch.randn(symbols, width))
        self.position = nn.Parameter(0.1 * torch.randn(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, (2 * layers) ** -0.5) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        mask = torch.full((context, context), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)
        self.head = None if tied else nn.Parameter(0.1 * torch.randn(symbols, width))

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits (batch, context, symbols) of the next character after each (batch, context)."""
        x = F.embedding(characters, self.embedding) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        logits: Tensor = self.norm(x) @ (self.embedding if self.head is None else self.head).T
        return logits


class Block(nn.Module):
    """A transformer block: self-attention and a perceptron, each with normalization and a residual connection."""

    def __init__(self, width: int, heads: int, residual: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.mix = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        for layer, gain in ((self.mix, 1.0), (self.out, residual), (self.up, 1.0), (self.down, residual)):
            nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the output (batch, context, width); `mask` (context, context) is -inf for later characters, else 0."""
        x = x + self.out(self._attention(self.mix(self.norm_1(x)), mask))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return result

    def _attention(self, mixed: Tensor, mask: Tensor) -> Tensor:
        batch, context, width = mixed.shape[0], mixed.shape[1], mixed.shape[2] // 3
        parts = mixed.view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5 + mask
        mixture: Tensor = scores.softmax(-1) @ value
        return mixture.transpose(1, 2).reshape(batch, context, width)
