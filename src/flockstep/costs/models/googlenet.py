"""The shape of GoogLeNet (Szegedy et al. 2014, table 1)."""

from __future__ import annotations

from flockstep.costs.builder import At, Net, in_parallel
from flockstep.costs.layers import ModelShape

INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Inception block → numbers of channels of its convolutions: 1 × 1; 3 × 3 reduce and 3 × 3; 5 × 5 reduce and 5 × 5; 1 ×
1 after the pooling.
"""
NOTE = (
    "the published network for inputs of 224 × 224, with biases, without its two auxiliary classifiers and without "
    "batch normalization; local response normalization and dropout are left out; often quoted as 6.8 M parameters"
)


def googlenet(classes: int = 1000) -> ModelShape:
    """Return the shape of GoogLeNet: three convolutions, nine inception blocks and a fully connected layer.

    The network has 6,998,552 parameters and 1.6 G multiply-adds.
    """
    net = Net()
    x = net.relu(net.conv(At(3, 224), "conv1", 64, 7, 2, 3), "relu1")
    x = net.pool(x, "pool1", 3, 2, ceil=True)
    x = net.relu(net.conv(x, "conv2.reduce", 64, 1), "relu2.reduce")
    x = net.relu(net.conv(x, "conv2", 192, 3, pad=1), "relu2")
    x = net.pool(x, "pool2", 3, 2, ceil=True)
    for name, widths in INCEPTIONS.items():
        if name in ("4a", "5a"):
            x = net.pool(x, f"pool{int(name[0]) - 1}", 3, 2, ceil=True)
        x = _inception(net, x, name, widths)
    net.linear(net.pool(x, "average", 7, 1), "fc", classes)
    return net.shape("googlenet", NOTE)


def _inception(net: Net, x: At, name: str, widths: tuple[int, ...]) -> At:
    one, three_reduced, three, five_reduced, five, pooled = widths

    def conv(y: At, what: str, channels: int, kernel: int = 1) -> At:
        return net.relu(net.conv(y, f"{name}.{what}", channels, kernel, pad=kernel // 2), f"{name}.relu.{what}")

    return in_parallel(
        [
            conv(x, "1x1", one),
            conv(conv(x, "3x3.reduce", three_reduced), "3x3", three, 3),
            conv(conv(x, "5x5.reduce", five_reduced), "5x5", five, 5),
            conv(net.pool(x, f"{name}.pool", 3, 1, 1), "pool.project", pooled),
        ]
    )
