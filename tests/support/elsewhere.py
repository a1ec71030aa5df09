"""Tensors that numpy cannot read, as those on a GPU, and a job whose parameters lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from flockstep.arrays.namespace import to_host, to_tensor
from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Evaluation, Indices
from flockstep.frameworks.numpy import NumpyEngine


class Elsewhere(torch.Tensor):
    """A tensor, and whatever is computed from it, that must be moved to the host before numpy can read it."""

    def __array__(self, *_: Any) -> NoReturn:
        raise TypeError("this tensor does not lie in the host's memory; use to_host")

    def numpy(self, **_: Any) -> NoReturn:
        self.__array__()

    def cpu(self, **_: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


Elsewhere.__module__, Elsewhere.__name__ = (
    "torch",
    "Tensor",
)  # saved states take plain tensors alone, as this stands for


def elsewhere(array: FlatArray) -> Elsewhere:
    """Copy a numpy array to the other device."""
    moved: Elsewhere = torch.tensor(array).as_subclass(Elsewhere)
    return moved


class EngineElsewhere(NumpyEngine):
    """Computes as numpy does, for parameters elsewhere."""

    def initial(self) -> Any:
        return elsewhere(super().initial())

    def gradients(
        self, params: Any, indices: Indices, out: Any, replicas: Sequence[int], steps: Sequence[int]
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        here = np.empty(out.shape, self.schema.dtype)
        losses = super().gradients(to_host(params), indices, here, replicas, steps)
        out[:] = to_tensor(here)
        return losses

    def evaluate(self, params: Any, replicas: Sequence[int] = (0,)) -> Evaluation:
        return super().evaluate(to_host(params), replicas)
