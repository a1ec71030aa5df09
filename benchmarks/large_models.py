"""Models of the size of ResNet-18 and GPT-2 small in plain torch, with a batch of random data for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention

from flockstep.workloads.digits import Digits


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch normalization, added to their input (He et al. 2016)."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = relu(self.norms[0](self.first(x)))
        return relu(self.norms[1](self.second(y)) + self.shortcut(x))


def resnet18(classes: int = 1000) -> nn.Module:
    """ResNet-18: 11.7 M parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    width = 64
    for outside in (64, 128, 256, 512):
        layers += [ResidualBlock(width, outside, 1 if outside == 64 else 2), ResidualBlock(outside, outside, 1)]
        width = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


class Block(nn.Module):
    """A layer of a decoder: causal attention and an MLP, each behind a layer normalization."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.attention(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """A decoder-only transformer whose output layer shares the weights of its embedding (Radford et al. 2019)."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, tokens: int = 50257, context: int = 1024):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.out.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.out(self.norm(self.blocks(x))).flatten(0, 1)


@dataclass(frozen=True)
class Model:
    """A model, one batch of `batch` samples for it, and the usual number of samples of a batch."""

    build: Callable[[], nn.Module]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    batch: int


def images(side: int, classes: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Random square images with labels."""
    return lambda batch: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,)))


def sentences(length: int, tokens: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens with the tokens that follow."""
    return lambda batch: (torch.randint(tokens, (batch, length)), torch.randint(tokens, (batch * length,)))


def digits(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits of the training set."""
    data = Digits().job(0).data()
    chosen = torch.randperm(len(data.train_x))[:batch]
    return torch.as_tensor(data.train_x)[chosen], torch.as_tensor(data.train_y)[chosen]


def wide(width: int) -> nn.Module:
    """Six square layers, 6 x width² parameters, whose activations are small."""
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(width, width, bias=False), nn.Tanh())])


def vectors(width: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    """Random vectors with labels."""
    return lambda batch: (torch.randn(batch, width), torch.randint(width, (batch,)))


MODELS = {
    "digits": Model(lambda: Digits().job(0).model(), digits, 32),
    "resnet18": Model(resnet18, images(64, 1000), 8),
    "gpt2": Model(Decoder, sentences(64, 50257), 1),
    "wide20m": Model(lambda: wide(1826), vectors(1826), 1),
    "wide100m": Model(lambda: wide(4082), vectors(4082), 1),
    "wide200m": Model(lambda: wide(5774), vectors(5774), 1),
    "wide250m": Model(lambda: wide(6455), vectors(6455), 1),
}
