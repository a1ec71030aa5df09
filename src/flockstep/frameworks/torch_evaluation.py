"""Evaluates one torch model, or the averaged predictions of several models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flockstep.arrays.schema import slices
from flockstep.frameworks.base import Data, Evaluation
from flockstep.frameworks.torch_call import called

AT_ONCE = 512
"""Number of test samples that go through the model in one call."""


def evaluate(
    module: torch.nn.Module,
    members: Sequence[Mapping[str, torch.Tensor]],
    data: Data,
    loss: Callable[[Any, Any], Any],
    metric: Callable[[Any, Any], Any],
    classes: bool,
) -> Evaluation:
    """Return loss and metric on the test set of the mean prediction of the models `members`, each given by its
    parameters and buffers by name.
    """
    size = len(data.test_x)
    losses = metrics = 0.0
    module.eval()
    try:
        with torch.no_grad():
            for part in slices(size, -(-size // AT_ONCE)):
                x, y = data.test_x[part], data.test_y[part]
                outputs = combined([called(module, state, x) for state in members], classes)
                losses += float(loss(outputs, y)) * len(x)
                metrics += float(metric(outputs, y)) * len(x)
    finally:
        module.train()
    return Evaluation(losses / size, metrics / size)


def distance(outputs: torch.Tensor, teacher: torch.Tensor, classes: bool) -> torch.Tensor:
    """Return the distance of outputs from the combined outputs of teachers: the cross-entropy for classes, otherwise
    the mean squared difference.
    """
    if not classes:
        return torch.nn.functional.mse_loss(outputs, teacher)
    return -(torch.softmax(teacher, -1) * torch.log_softmax(outputs, -1)).sum(-1).mean()


def combined(outputs: Sequence[torch.Tensor], classes: bool) -> torch.Tensor:
    """Return the mean of several models' outputs. With `classes`, return the logarithm of the mean probabilities."""
    if len(outputs) == 1:
        return outputs[0]
    stacked = torch.stack(list(outputs))
    if not classes:
        return stacked.mean(0)
    return torch.logsumexp(torch.log_softmax(stacked, -1), 0) - math.log(len(outputs))
