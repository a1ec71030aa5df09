"""A torch model without the values of its parameters, for a process that holds only one part of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import reduce
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import torch

from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, RunError
from flockstep.frameworks.base import Engine, Evaluation, Indices, Job
from flockstep.frameworks.torch import Tensors, seeded, stream_of
from flockstep.frameworks.torch_flat import schema_of
from flockstep.frameworks.torch_job import classes_of, optimizer_of, samples_of, tensors_of
from flockstep.partitions.split_facts import SplitFacts


class SkeletonEngine(Engine):
    """The engine of a job whose torch model has shapes but no values (torch's meta device). The part that this process
    holds gets its values from a process that has built the whole model. The memory of this engine does not grow with
    the model.
    """

    def __init__(self, job: Job, seed: int, facts: SplitFacts):
        """Build the model without values, and load the data; raise `ConfigurationError` if parameters are not built on
        torch's default device, or the data are drawn from the random numbers that the model draws from.
        """
        assert job.loss is not None
        self._seed, self._facts = seed, facts
        with seeded(seed):
            with torch.device("meta"):
                module: torch.nn.Module = job.model()
            before = torch.get_rng_state()
            data = job.data()
            if not torch.equal(torch.get_rng_state(), before):
                raise ConfigurationError(
                    "data drawn with torch's random numbers depend on the numbers that the model has drawn before; "
                    "draw the data with a separate torch.Generator"
                )
        for name, one in module.named_parameters():
            if not one.is_meta:
                raise ConfigurationError(
                    f"a model without values must be built on torch's default device, got {name!r} on {one.device}; "
                    "create parameters without a device of their own"
                )
        self.module, self.loss = module.train(), job.loss
        named = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self.schema = schema_of(named)
        self.optimizer = optimizer_of(job, self.schema, list(named.values()))
        self.higher_is_better = job.higher_is_better
        self._data = tensors_of(data, reduce(torch.promote_types, (p.dtype for p in named.values())))
        self.train_size, self.labels = len(self._data.train_x), classes_of(self._data)
        self.classes = self.labels is not None
        self.constants: Tensors = {}
        """Name → value of the tensors of this process's part that are not trained."""

    def samples(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of the training samples `indices`."""
        return samples_of(self._data, indices)

    def stream(self, replica: int, step: int, *part: int) -> contextlib.AbstractContextManager[None]:
        """Return a context in which torch's random numbers are seeded in the same way as in a `TorchEngine`."""
        return stream_of(self._seed, replica, step, *part) if self._facts.random else contextlib.nullcontext()

    @property
    def changing_buffers(self) -> Tensors:
        """Name → initial value of every buffer of this process's part that changes in training."""
        return {name: self.constants[name] for name in self._facts.changing if name in self.constants}

    def initial(self) -> FlatArray:
        return self._refuse()

    def gradient(self, params: FlatArray, indices: Indices, out: FlatArray, replica: int = 0, step: int = 0) -> float:
        return self._refuse()

    def gradients(
        self, params: FlatArray, indices: Indices, out: FlatArray, replicas: Sequence[int], steps: Sequence[int]
    ) -> npt.NDArray[np.float64]:
        return self._refuse()

    def evaluate(self, params: FlatArray, replicas: Sequence[int] = (0,)) -> Evaluation:
        return self._refuse()

    def _refuse(self) -> NoReturn:
        raise RunError("this process holds only one part of the model; use a process that holds the whole model")
