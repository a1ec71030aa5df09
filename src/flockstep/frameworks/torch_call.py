"""Calls of a torch module with parameters and buffers other than its own, and evaluations of such calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flockstep.arrays.schema import slices
from flockstep.frameworks.base import Data, Evaluation


class Substituted:
    """A torch module whose forward pass is computed with parameters and buffers other than its own."""

    def __init__(self, module: torch.nn.Module):
        """Find the places of the tensors of `module`, which stay the same from call to call."""
        self._module = module
        first: dict[int, str] = {}
        self._places: list[tuple[dict[str, Any], str, str]] = []
        """Table inside a module, key in the table, and the tensor's name in `module`, the first of a tied tensor."""
        for path, owner in module.named_modules():
            for table in (owner._parameters, owner._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        name = first.setdefault(id(tensor), f"{path}.{key}" if path else key)
                        self._places.append((table, key, name))

    def __call__(self, values: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> Any:
        """Return the outputs with `values` in place of the parameters and buffers of these names."""
        with self.holding(values):
            return self._module(inputs)

    @contextmanager
    def holding(self, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Return a context in which `values` take the place of the parameters and buffers of the same names.

        A tied tensor has its value under its first name. Afterwards the module is as before, even if a module appears
        in it twice.
        """
        before = [(table, key, table[key]) for table, key, name in self._places if name in values]
        try:
            for table, key, name in self._places:
                if name in values:
                    table[key] = values[name]
            yield
        finally:
            for table, key, tensor in before:
                table[key] = tensor


def called(module: torch.nn.Module, values: Mapping[str, torch.Tensor], inputs: torch.Tensor) -> Any:
    """Return the outputs of `module` with `values` in place of the module's parameters and buffers."""
    return Substituted(module)(values, inputs)


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
    """Return loss and metric on the test set of the mean prediction of `members`: parameters and buffers by name."""
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
    """Return the distance from outputs of teachers: cross-entropy for classes, else the mean squared difference."""
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
