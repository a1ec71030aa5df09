"""A custom job for `flockstep train`, `simulate` and `compare`: model, data, loss, optimizer, target."""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

from flockstep import Data, Job


def data() -> Data:
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    return Data(x[:455], y[:455], x[455:], y[455:])


def job() -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2)),
        data=data,
        loss=nn.functional.cross_entropy,
        optimizer="sgd(lr=0.1, momentum=0.9)",
        batch=16,
        epochs=20,
        target=0.95,
        name="breast cancer",
    )
