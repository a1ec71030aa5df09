"""A locally connected layer for torch: a convolution whose weights differ from place to place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 -- what every user of torch calls it
from torch import Tensor, nn

from flockstep.costs import formulas
from flockstep.costs.layers import Layer, Pass
from flockstep.errors import ConfigurationError, require
from flockstep.frameworks.torch_kinds import ModuleCall, register_kind


class LocallyConnected2d(nn.Module):
    """A layer in which every output reads a window of the inputs with weights of its own (Dean et al. 2012, section 3;
    Coates et al. 2013, section 4): inputs (batch, in_channels, H, W) → outputs (batch, out_channels, H', W').

    As for a convolution, H' = ⌊(H + 2 padding - kernel_size) / stride⌋ + 1; no two places share weights.
    """

    def __init__(
        self,
        size: tuple[int, int],
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
    ):
        """Create a layer with weights as torch initializes those of a convolution.

        Args:
            size: height and width of the inputs.
            in_channels: number of channels of the inputs.
            out_channels: number of channels of the outputs.
            kernel_size: side length of the square window, in places.
            stride: number of places from one window to the next.
            padding: number of places of zeros on each side of the inputs.
            bias: whether every output has a bias of its own.

        Raises:
            ConfigurationError: a number is too small, or the window is larger than the padded inputs.
        """
        super().__init__()
        plane: object = size
        two = (
            isinstance(plane, Sequence) and len(plane) == 2 and all(isinstance(one, int) and one >= 1 for one in plane)
        )
        rule = "two integers >= 1, the height and width of its inputs"
        require(two, "size of a locally connected layer", rule, repr(size), "use for example (8, 8)")
        for name, value, least in (
            ("in_channels", in_channels, 1),
            ("out_channels", out_channels, 1),
            ("kernel_size", kernel_size, 1),
            ("stride", stride, 1),
            ("padding", padding, 0),
        ):
            name = f"{name} of a locally connected layer"
            require(value >= least, name, f">= {least}", value, f"use {least} or more")
        rule = f"at most the {size[0]} x {size[1]} inputs with {padding} places of padding on each side"
        fits, name = kernel_size <= min(size) + 2 * padding, "kernel_size of a locally connected layer"
        require(fits, name, rule, kernel_size, "use a smaller window")
        self.size = tuple(size)
        self.kernel_size, self.stride, self.padding = (kernel_size,) * 2, (stride,) * 2, (padding,) * 2
        self.in_channels, self.out_channels = in_channels, out_channels
        places = [(length + 2 * padding - kernel_size) // stride + 1 for length in size]
        bound = 1 / math.sqrt(in_channels * kernel_size**2)
        self.weight = nn.Parameter(torch.empty(*places, out_channels, in_channels, kernel_size, kernel_size))
        """Weights, of shape (H', W', out_channels, in_channels, kernel_size, kernel_size)."""
        self.bias = nn.Parameter(torch.empty(*places, out_channels)) if bias else None
        """Biases, of shape (H', W', out_channels); None without biases."""
        for one in self.parameters():
            nn.init.uniform_(one, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (batch, out_channels, H', W'); raise `ConfigurationError` for inputs of another shape."""
        if tuple(x.shape[1:]) != (self.in_channels, *self.size):
            raise ConfigurationError(
                f"inputs of a locally connected layer must have the shape (batch, {self.in_channels}, {self.size[0]}, "
                f"{self.size[1]}), got {tuple(x.shape)}; create the layer with the size and in_channels of its inputs"
            )
        down, right = self.padding
        if down or right:
            x = F.pad(x, (right, right, down, down))
        windows = x.unfold(2, self.kernel_size[0], self.stride[0]).unfold(3, self.kernel_size[1], self.stride[1])
        outputs = torch.einsum("nchwij,hwocij->nohw", windows, self.weight)
        return outputs if self.bias is None else outputs + self.bias.permute(2, 0, 1)


def _formula(call: ModuleCall) -> Layer:
    """The work of a convolution; the gradient of a weight is a sum over the samples only."""
    m = call.module
    inputs, outputs = call.x.shape[-2:], call.y.shape[-2:]
    layer = formulas.convolution(
        call.name, m.in_channels, m.out_channels, (m.kernel_size, inputs, outputs), data=call.data
    )
    return dataclasses.replace(
        layer, kind="locally connected", by_weight=Pass(layer.by_weight.products, sums=1, summed=1)
    )


register_kind(LocallyConnected2d, _formula)
