"""What a job says, as torch takes it: its data as tensors, its metric, its optimizer as ours."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flockstep.arrays.namespace import as_tensor
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.torch_flat import FlatModule
from flockstep.frameworks.torch_optimizers import from_torch
from flockstep.optimizers.base import Optimizer


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Share of the targets, (batch, …), whose class has the largest output; classes on the last axis, or on the second.

    Raises:
        ConfigurationError: the shapes do not fit.
    """
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


def optimizer_of(job: Job, flat: FlatModule) -> Optimizer:
    """The job's optimiser as ours, after a check that a torch one updates every trainable parameter."""
    if isinstance(job.optimizer, (Optimizer, str)):
        return Optimizer.parse(job.optimizer)
    theirs = job.optimizer(list(flat.parameters))
    optimizer = from_torch(theirs)
    updated = {id(p) for group in theirs.param_groups for p in group["params"]}
    for entry, parameter in zip(flat.schema.entries, flat.parameters, strict=True):
        if id(parameter) not in updated:
            raise ConfigurationError(
                f"{type(theirs).__name__} must update every trainable parameter, leaves out {entry.name!r}; freeze it "
                f"with requires_grad_(False)"
            )
    return optimizer


def tensors_of(data: Data, dtype: torch.dtype) -> Data:
    """The data as tensors: floating point in the widest dtype of the model, whole numbers as int64."""

    def convert(values: Any) -> torch.Tensor:
        tensor = as_tensor(values) if isinstance(values, np.ndarray) else torch.as_tensor(values)
        tensor = tensor.detach().cpu().contiguous()
        if tensor.is_floating_point():
            return tensor.to(dtype)
        return tensor if tensor.dtype == torch.bool or tensor.is_complex() else tensor.to(torch.int64)

    return Data(convert(data.train_x), convert(data.train_y), convert(data.test_x), convert(data.test_y))
