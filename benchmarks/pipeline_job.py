"""Job of a GPT of 30 million parameters as a chain of layers, for `pipeline.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from flockstep.frameworks.base import Data, Job
from flockstep.workloads.models import seeded

SYMBOLS, CONTEXT, WIDTH, LAYERS, HEADS = 4096, 32, 512, 8, 8
BATCH = 8


class Input(nn.Module):
    """Embedding of tokens and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(SYMBOLS, WIDTH), nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the sum of both embeddings, (batch, context, width)."""
        embedded: Tensor = self.tokens(tokens) + self.positions
        return embedded


class Block(nn.Module):
    """Causal attention and a perceptron, each normalizing its input and adding its output to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return an array of the shape of x, (batch, context, width)."""
        query, key, value = self.mix(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixture = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixture.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return result


def model() -> nn.Sequential:
    """The GPT; input and output embeddings have weights of their own."""
    blocks = [Block() for _ in range(LAYERS)]
    return seeded(0, lambda: nn.Sequential(Input(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def data() -> Data:
    """Random tokens, of which each is to be predicted from those before."""
    tokens = torch.randint(0, SYMBOLS, (64 + BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return Data(tokens[:64, :-1], tokens[:64, 1:], tokens[64:, :-1], tokens[64:, 1:])


def job() -> Job:
    """The job."""
    return Job(model, data, "sgd(lr=0.01)", loss, metric=lambda outputs, targets: float(loss(outputs, targets)),
               higher_is_better=False, batch=BATCH, name="gpt-30m")  # fmt: skip
