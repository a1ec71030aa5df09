"""Jobs that are sealed in tests: a CNN, a GPT with tied embeddings, an LSTM, a network with BatchNorm and Dropout."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 -- what every user of torch calls it
from torch import Tensor, nn

from flockstep import Data, Job
from support.sealed_data import LENGTH, WORDS, image_data, text_data

WIDTH, HEADS = 16, 2


def class_data() -> Data:
    text = text_data()
    return Data(text.train_x, text.train_y[:, -1] % 4, text.test_x, text.test_y[:, -1] % 4)


class HiddenBlock(nn.Module):
    """A block whose names must not travel."""

    def __init__(self) -> None:
        super().__init__()
        self.secret_norm = nn.LayerNorm(WIDTH)
        self.secret_queries = nn.Linear(WIDTH, 3 * WIDTH)
        self.secret_output = nn.Linear(WIDTH, WIDTH)

    def forward(self, residual_stream: Tensor) -> Tensor:
        batch, length, _ = residual_stream.shape
        queries, keys, values = (
            part.view(batch, length, HEADS, -1).transpose(1, 2)
            for part in self.secret_queries(self.secret_norm(residual_stream)).split(WIDTH, -1)
        )
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return residual_stream + self.secret_output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class HiddenTransformer(nn.Module):
    """A GPT whose output layer has the weights of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.secret_embedding = nn.Embedding(WORDS, WIDTH)
        self.secret_places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.secret_blocks = nn.Sequential(HiddenBlock(), HiddenBlock())
        self.secret_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.secret_head.weight = self.secret_embedding.weight

    def forward(self, token_numbers: Tensor) -> Tensor:
        embedded = self.secret_embedding(token_numbers) + self.secret_places
        return self.secret_head(self.secret_blocks(embedded))


class HiddenRecurrence(nn.Module):
    """An LSTM that classifies its last state, and returns it beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.secret_embedding = nn.Embedding(WORDS, WIDTH)
        self.secret_cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.secret_classes = nn.Linear(WIDTH, 4)

    def forward(self, token_numbers: Tensor) -> dict[str, Tensor]:
        states, _ = self.secret_cells(self.secret_embedding(token_numbers))
        with torch.no_grad():
            center = states[:, -1].mean()
        return {"secret_logits": self.secret_classes(states[:, -1] - center), "secret_state": states[:, -1]}


def normed_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10)
    )


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def nats_per_token(outputs: Tensor, targets: Tensor) -> float:
    return float(token_loss(outputs, targets))


def last_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs["secret_logits"], targets) + 0.001 * outputs["secret_state"].square().mean()


def last_accuracy(outputs: dict[str, Tensor], targets: Tensor) -> float:
    return (outputs["secret_logits"].argmax(-1) == targets).double().mean().item()


def cnn() -> Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10))

    return Job(model, image_data, "sgd(lr=0.1, momentum=0.9)", nn.CrossEntropyLoss(label_smoothing=0.1), batch=16)


def gpt() -> Job:
    return Job(
        HiddenTransformer, text_data, "adam(lr=0.01)", token_loss, nats_per_token, higher_is_better=False, batch=16
    )


def lstm() -> Job:
    return Job(HiddenRecurrence, class_data, "sgd(lr=0.1)", last_loss, last_accuracy, batch=16)


def normed() -> Job:
    return Job(normed_network, image_data, "sgd(lr=0.05)", nn.CrossEntropyLoss(), batch=16, schedule="cosine")


JOBS: dict[str, Callable[[], Job]] = {"cnn": cnn, "gpt": gpt, "lstm": lstm, "normed": normed}
