"""Converts a job to torch: the data to tensors, and the metric and the optimizer to forms that the engine uses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flockstep.arrays.namespace import as_tensor
from flockstep.arrays.schema import Schema
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Indices, Job
from flockstep.frameworks.streams import SampleColumn
from flockstep.frameworks.torch_optimizers import from_torch
from flockstep.optimizers.base import Optimizer

CHECKED = 64
"""Number of training samples, evenly spaced, whose values the processes of a split model compare."""


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the fraction of the targets (batch, …) with the largest output; classes on axis -1 or 1 of outputs."""
    if outputs.shape[:-1] == targets.shape:
        guesses = outputs.argmax(-1)
    elif outputs.shape[:1] + outputs.shape[2:] == targets.shape:
        guesses = outputs.argmax(1)
    else:
        raise ConfigurationError(
            f"accuracy needs outputs (batch, …, classes) for targets (batch, …), got {tuple(outputs.shape)} for "
            f"{tuple(targets.shape)}; pass metric=a function (outputs, targets) → float"
        )
    return float((guesses == targets).double().mean())


def optimizer_of(job: Job, schema: Schema, parameters: Sequence[torch.nn.Parameter]) -> Optimizer:
    """Return the job's flockstep optimizer; raise `ConfigurationError` if a torch optimizer has no counterpart."""
    if isinstance(job.optimizer, (Optimizer, str)):
        return Optimizer.parse(job.optimizer)
    theirs = job.optimizer(list(parameters))
    optimizer = from_torch(theirs)
    updated = {id(p) for group in theirs.param_groups for p in group["params"]}
    for entry, parameter in zip(schema.entries, parameters, strict=True):
        if id(parameter) not in updated:
            raise ConfigurationError(
                f"{type(theirs).__name__} must update every trainable parameter, but {entry.name!r} is missing; pass "
                "all parameters, or freeze this parameter with requires_grad_(False)"
            )
    return optimizer


def tensors_of(data: Data, dtype: torch.dtype) -> Data:
    """Return the data as tensors: floating-point values in the model's widest dtype, integers as int64."""

    def convert(values: Any) -> Any:
        if isinstance(values, SampleColumn):
            return values.mapped(convert)
        tensor = as_tensor(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor if tensor.dtype == torch.bool or tensor.is_complex() else tensor.to(torch.int64)

    return Data(convert(data.train_x), convert(data.train_y), convert(data.test_x), convert(data.test_y))


def samples_of(data: Data, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of the training samples `indices`, from data that `tensors_of` returned."""
    index = as_tensor(indices)
    return data.train_x.index_select(0, index), data.train_y.index_select(0, index)


def sample_facts(samples: Callable[[Indices], tuple[torch.Tensor, torch.Tensor]], size: int) -> dict[str, str]:
    """Return hashes of the inputs and the targets of up to `CHECKED` of the `size` training samples."""
    x, y = samples(np.unique(np.linspace(0, size - 1, CHECKED).astype(np.int64)))
    return {"inputs": _digest(x), "targets": _digest(y)}


def _digest(values: torch.Tensor) -> str:
    plain = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{tuple(values.shape)} {values.dtype}".encode() + plain.tobytes()).hexdigest()[:16]


def classes_of(data: Data) -> npt.NDArray[np.int64] | None:
    """Return the class of every training sample; None if the targets are not classes."""
    y = data.train_y
    labels: npt.NDArray[np.int64] | None = y.numpy() if y.dtype == torch.int64 and y.dim() == 1 else None
    return labels
