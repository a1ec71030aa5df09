"""The receptive fields of torch layers over images: the rectangle of inputs that an output reads."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from torch import nn

from flockstep.frameworks.grid import PlaneRectangle
from flockstep.frameworks.torch_blocks import hooked, is_elementwise_layer
from flockstep.frameworks.torch_local import LocallyConnected2d


@dataclass(frozen=True)
class ReceptiveField:
    """The inputs that one output of a layer reads; each field is for height and width."""

    size: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    fill: float = 0.0
    """Value of the places around the inputs."""

    def outputs(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the outputs, for inputs of the given height and width."""
        found = [(size[a] + 2 * self.padding[a] - self.size[a]) // self.stride[a] + 1 for a in (0, 1)]
        return found[0], found[1]

    def read(self, made: PlaneRectangle) -> PlaneRectangle:
        """Return the places of the inputs that a rectangle of outputs reads; they may lie outside of the plane."""
        spans = [
            (first * self.stride[a] - self.padding[a], (end - 1) * self.stride[a] - self.padding[a] + self.size[a])
            for a, (first, end) in enumerate([(made.top, made.bottom), (made.left, made.right)])
        ]
        return PlaneRectangle(*spans[0], *spans[1])


def receptive_field_of(module: nn.Module) -> ReceptiveField | None:
    """Return the receptive field of a layer that can be divided into rectangles; None for other layers."""
    if is_elementwise_layer(module):
        return ReceptiveField()
    found = None if hooked(module) else _field_of(module)
    return found if found is not None and all(map(operator.lt, found.padding, found.size)) else None


def _field_of(module: nn.Module) -> ReceptiveField | None:
    match module:
        case LocallyConnected2d():
            if type(module) is LocallyConnected2d and all(one.requires_grad for one in module.parameters()):
                return ReceptiveField(module.kernel_size, module.stride, module.padding)
        case nn.Conv2d():
            plain = type(module) is nn.Conv2d and module.padding_mode == "zeros" and set(module.dilation) == {1}
            if plain and not isinstance(module.padding, str):
                return ReceptiveField(_pair(module.kernel_size), _pair(module.stride), _pair(module.padding))
        case nn.MaxPool2d():
            if type(module) is nn.MaxPool2d and _pair(module.dilation) == (1, 1) and not module.return_indices:
                return None if module.ceil_mode else _pool(module, -math.inf)
        case nn.AvgPool2d():
            counted = module.count_include_pad or _pair(module.padding) == (0, 0)
            return _pool(module, 0.0) if type(module) is nn.AvgPool2d and counted and not module.ceil_mode else None
    return None


def _pool(module: nn.MaxPool2d | nn.AvgPool2d, fill: float) -> ReceptiveField:
    return ReceptiveField(_pair(module.kernel_size), _pair(module.stride), _pair(module.padding), fill)


def _pair(value: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, int]:
    """The values for height and width; torch also takes one number, or a sequence of one number, for both."""
    both = [operator.index(one) for one in (value if isinstance(value, Sequence) else [value])]
    return both[0], both[-1]
