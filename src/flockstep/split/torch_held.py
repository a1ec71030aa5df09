"""The tensors that each part of a torch model trains, and the layers that can be divided among parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flockstep.arrays.schema import Entry, Schema
from flockstep.frameworks.torch import TorchEngine
from flockstep.split.torch_chain import ChainLayer, chain_of, is_chain
from flockstep.split.torch_trace import is_elementwise, opened, traced_chain

ELEMENTWISE = (
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold,
    nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Dropout,
)  # fmt: skip
"""Layers without parameters that treat every element alike, so that a part applies them to its own features."""


@dataclass(frozen=True)
class Held:
    """A parameter, or a piece of a parameter, that one part trains."""

    name: str
    """Name in the flat array of all parts."""
    entry: Entry
    """The whole parameter in the flat array of the unsplit model, with the dtype of the parameter."""
    shape: tuple[int, ...]
    """Shape of what the part holds."""
    index: tuple[Any, ...] = ()
    """Slices that take these elements out of the whole parameter in its shape, or in the shape `view`."""
    view: tuple[int, ...] = ()
    start: int | None = None
    """First flat index within the whole parameter, if all parts compute with the parameter and each trains a span."""

    @classmethod
    def whole(cls, entry: Entry) -> Held:
        """Return a parameter that a part holds as a whole."""
        return cls(entry.name, entry, entry.shape)

    @property
    def size(self) -> int:
        """Number of elements of the parameter that the part holds."""
        return math.prod(self.shape)

    def places(self) -> npt.NDArray[np.int64]:
        """Return the indices (size,) of the elements in the flat array of the unsplit model."""
        numbers = np.arange(self.entry.size).reshape(self.view or self.entry.shape)
        found: npt.NDArray[np.int64] = self.entry.offset + numbers[self.index].reshape(-1)
        return found


def trained_entries(schema: Schema) -> dict[str, Entry]:
    """Return name → place and dtype of every trained parameter of a module."""
    return {entry.name: replace(entry, dtype=entry.dtype or schema.dtype) for entry in schema.entries}


def schema_of_parts(held: Sequence[Sequence[Held]]) -> Schema:
    """Return the layout of a flat array with the tensors of all parts, one part after another."""
    every = [one for tensors in held for one in tensors]
    return Schema.of({one.name: one.shape for one in every}, {one.name: one.entry.dtype for one in every})


def order_of(held: Sequence[Sequence[Held]]) -> npt.NDArray[np.int64] | None:
    """Return the place in the unsplit model's flat array of each element of an array with the parts' tensors; None if
    the places are the same.
    """
    every = [one for tensors in held for one in tensors]
    starts = accumulate((one.size for one in every), initial=0)
    if all((one.entry.offset, one.entry.size) == (start, one.size) for one, start in zip(every, starts, strict=False)):
        return None
    return np.concatenate([one.places() for one in every])


def model_chain(module: nn.Module, who: str) -> list[ChainLayer]:
    """Return the layers of an `nn.Sequential`, or the units of a module that is traced."""
    return chain_of(module, who) if is_chain(module) else traced_chain(module, who)


def opened_chain(module: nn.Module, who: str) -> list[ChainLayer]:
    """Return the layers of a model, with those modules of a traced model that a unit consists of."""
    return [opened(one) for one in model_chain(module, who)]


def kind_of(module: nn.Module) -> str:
    """Return what a layer is, in words."""
    return "traced operations" if isinstance(module, fx.GraphModule) else type(module).__name__


def is_elementwise_layer(module: nn.Module) -> bool:
    """Return whether a layer has no parameters and treats every element of its input in the same way."""
    return (type(module) in ELEMENTWISE or is_elementwise(module)) and not hooked(module)


def hooked(module: nn.Module) -> bool:
    """Return whether a module has hooks, which run only if the module itself is called."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def of_all_samples(whole: TorchEngine) -> tuple[str, ...]:
    """Return what a model has that depends on all samples of a batch, in words."""
    found = [
        f"{type(module).__name__} in {name}"
        for name, module in whole.module.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]
    norms = [name.partition(" in ")[2] for name in found]
    others = (name for name in whole.changing_buffers if name.rpartition(".")[0] not in norms)
    return (*found, *(f"the buffer {name}, which changes in training" for name in others))
