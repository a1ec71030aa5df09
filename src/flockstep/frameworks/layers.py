"""Finds the layers of a job's model and their costs, for each framework."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from flockstep.costs import formulas
from flockstep.costs.layers import Layer, ModelShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Job
from flockstep.frameworks.job import build_model, failure, imported, launch_instead, load_job_file, may_define
from flockstep.frameworks.numpy import Model, SoftmaxRegression

SAMPLES = 4
"""Number of the job's training samples on which a torch module is run to find its layers."""


def job_shape(job: Job) -> ModelShape:
    """Return the layers of the job's model, found on a few samples of its training data; raise `ConfigurationError` if
    the model cannot be built or run, or is of an unknown kind.
    """
    model = build_model(job)
    if isinstance(model, Model):
        return _of_numpy(job.name, model)
    jax = sys.modules.get("flockstep.frameworks.jax")
    if jax is not None and isinstance(model, jax.JaxModel):
        from flockstep.frameworks import jax_layers

        return jax_layers.shape_of(model, np.array(job.data().train_x[:SAMPLES]), job.name)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"the model of job {job.name!r} must be a torch.nn.Module, a flockstep.jax.JaxModel or a "
            f"flockstep.frameworks.numpy.Model, got {type(model).__name__}; let model() return one of these"
        )
    from flockstep.frameworks.torch_layers import shape_of

    return shape_of(model.train(), _samples(job, model), name=job.name)


def file_shape(path: str | Path) -> ModelShape:
    """Return the layers of the model that a Python file declares by `job()`, or by `model()` and the `inputs()` with
    which the model is called.

    `inputs()` returns a tensor, or a tuple of tensors, with the samples along the first axis.

    Raises:
        ConfigurationError: there is no such file, the file declares neither a job nor a model, or one of its functions
            fails.
    """
    file = Path(path)
    if file.suffix != ".py" or not file.is_file():
        raise ConfigurationError(f"there is no Python file {str(path)!r}; check the path")
    where = f"file {str(path)!r}"
    lacks = ConfigurationError(
        f"{where} must have job(), or both model() and inputs(); add job(), or whichever of model() and inputs() is "
        f"missing; {launch_instead(path)}"
    )
    if not may_define(file, "job") and not (may_define(file, "model") and may_define(file, "inputs")):
        raise lacks
    module = imported(file.resolve(), where)
    if callable(getattr(module, "job", None)):
        return job_shape(load_job_file(path))
    if not callable(getattr(module, "model", None)) or not callable(getattr(module, "inputs", None)):
        raise lacks
    try:
        model, inputs = module.model(), module.inputs()
    except Exception as error:
        raise failure(error, where, file, "model() or inputs()") from error
    if not isinstance(inputs, tuple):
        inputs = (inputs,)
    from flockstep.frameworks.torch_layers import shape_of

    return shape_of(model, *inputs, name=file.stem)


def _samples(job: Job, model: Any) -> Any:
    """Return a few training samples, as the engine would pass them to the model."""
    import torch

    with torch.random.fork_rng(devices=[]):
        x = torch.as_tensor(np.array(job.data().train_x[:SAMPLES]))
    first = next(model.parameters(), None)
    if x.is_floating_point():
        return x if first is None else x.to(first.dtype)
    return x if x.dtype == torch.bool else x.to(torch.int64)


def _of_numpy(name: str, model: Model) -> ModelShape:
    """Return the layers of a softmax regression; of other numpy models only the parameters are known."""
    itemsize = np.dtype(model.dtype).itemsize
    if isinstance(model, SoftmaxRegression):
        layers = [
            formulas.linear("weight", model.features, model.classes, data=True),
            formulas.softmax("softmax", model.classes, model.classes),
        ]
        return ModelShape(name, tuple(layers), itemsize, "softmax regression in numpy")
    sizes = {key: int(np.prod(shape, dtype=np.int64)) for key, shape in model.shapes.items()}
    unknown = [Layer(key, "other", parameters=size, counted="unknown") for key, size in sizes.items()]
    return ModelShape(
        name, tuple(unknown), itemsize, f"{type(model).__name__} in numpy; the number of its operations is not known"
    )
