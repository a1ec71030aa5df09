"""The locally connected layer: a convolution if all places have the same weights; its work; what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from flockstep import LocallyConnected2d
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_layers import shape_of


@pytest.mark.parametrize(("stride", "padding", "bias"), [(1, 0, True), (2, 1, True), (3, 2, False)])
def test_equal_weights_at_all_places_are_those_of_a_convolution(stride: int, padding: int, bias: bool) -> None:
    """The oracle is torch's convolution, forward and backward."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 3, stride, padding, bias=bias).double()
    own = LocallyConnected2d((7, 6), 2, 3, 3, stride, padding, bias).double()
    with torch.no_grad():
        own.weight.copy_(conv.weight.expand_as(own.weight))
        if own.bias is not None and conv.bias is not None:
            own.bias.copy_(conv.bias.expand_as(own.bias))
    x = torch.randn(4, 2, 7, 6, dtype=torch.float64, requires_grad=True)
    slopes = []
    for layer in (conv, own):
        x.grad = None
        layer(x).square().sum().backward()
        slopes.append(x.grad)
    torch.testing.assert_close(own(x), conv(x), rtol=0, atol=1e-12)
    torch.testing.assert_close(slopes[1], slopes[0], rtol=0, atol=1e-12)
    assert own.weight.grad is not None
    torch.testing.assert_close(own.weight.grad.sum((0, 1)), conv.weight.grad, rtol=0, atol=1e-12)


def test_a_place_has_weights_of_its_own() -> None:
    """A weight of one place changes the outputs of that place only."""
    layer, x = LocallyConnected2d((5, 5), 1, 1, 3), torch.ones(1, 1, 5, 5)
    before = layer(x)
    with torch.no_grad():
        layer.weight[1, 2] += 1
    assert torch.nonzero(layer(x) - before).tolist() == [[0, 0, 1, 2]]


@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((2, 3, 3, 3), LocallyConnected2d((3, 3), 1, 1, 3)),
        ((2, 1, 5, 4), LocallyConnected2d((3, 3), 1, 1, 3)),
        ((1, 3, 3), LocallyConnected2d((3, 3), 1, 1, 3)),
        ((2, 4, 6, 5), LocallyConnected2d((5, 6), 4, 2, 3, padding=1)),
    ],
)
def test_inputs_of_another_shape_are_refused(shape: tuple[int, ...], layer: LocallyConnected2d) -> None:
    """Weights of a single place or channel would be used at all places and channels."""
    expected = rf"\(batch, {layer.in_channels}, {layer.size[0]}, {layer.size[1]}\), got {re.escape(str(shape))}; create"
    with pytest.raises(ConfigurationError, match=expected):
        layer(torch.zeros(shape))


def test_its_work_is_that_of_a_convolution() -> None:
    layers = LocallyConnected2d((6, 6), 2, 3, 3), nn.Conv2d(2, 3, 3)
    own, conv = (shape_of(one, torch.zeros(4, 2, 6, 6), name="layer") for one in layers)
    assert own.work(4) == conv.work(4)
    assert own.layers[0].kind == "locally connected"
    assert own.layers[0].parameters == 16 * (3 * 2 * 9 + 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": (8,)}, r"must be two integers >= 1, the height and width of its inputs, got \(8,\); use for exam"),
        ({"size": (0, 8)}, r"must be two integers >= 1, .*, got \(0, 8\); use"),
        ({"size": (5.0, 4)}, r"must be two integers >= 1, .*, got \(5\.0, 4\); use"),
        ({"size": 8}, "must be two integers >= 1, .*, got 8; use"),
        ({"in_channels": 0}, "in_channels of a locally connected layer must be >= 1, got 0; use 1 or more"),
        ({"padding": -1}, "padding of a locally connected layer must be >= 0, got -1; use 0 or more"),
        (
            {"kernel_size": 7},
            "must be at most the 5 x 4 inputs with 1 places of padding on each side, got 7; use a sma",
        ),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    facts: dict[str, Any] = {"size": (5, 4), "in_channels": 1, "out_channels": 1, "kernel_size": 3, "padding": 1}
    with pytest.raises(ConfigurationError, match=message):
        LocallyConnected2d(**(facts | given))
