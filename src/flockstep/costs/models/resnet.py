"""The shapes of residual networks of bottleneck blocks (He, Zhang, Ren & Sun 2015, table 1)."""

from __future__ import annotations

from collections.abc import Sequence

from flockstep.costs.builder import At, Net
from flockstep.costs.layers import ModelShape


def resnet_50(as_published: bool = False) -> ModelShape:
    """Return the shape of ResNet-50, with blocks (3, 4, 6, 3): 25,557,032 parameters and 4.1 G multiply-adds, or 3.8 G
    with `as_published`.
    """
    return resnet("resnet-50", (3, 4, 6, 3), as_published)


def resnet_152(as_published: bool = False) -> ModelShape:
    """Return the shape of ResNet-152, with blocks (3, 8, 36, 3): 60,192,808 parameters and 11.5 G multiply-adds, or
    11.3 G with `as_published`.
    """
    return resnet("resnet-152", (3, 8, 36, 3), as_published)


def resnet(name: str, blocks: Sequence[int], as_published: bool = False, classes: int = 1000) -> ModelShape:
    """Return the shape of a residual network of bottleneck blocks on inputs of 224 × 224.

    A block that halves the maps has the stride in its 3 × 3 convolution, as is common today. In the paper
    (`as_published`), the first 1 × 1 convolution has the stride, which needs fewer operations and the same parameters.
    """
    net = Net()
    x = net.relu(net.batch_norm(net.conv(At(3, 224), "conv1", 64, 7, 2, 3, bias=False), "bn1"), "relu1")
    x = net.pool(x, "pool1", 3, 2, 1)
    for stage, count in enumerate(blocks):
        for place in range(count):
            stride = 2 if stage and not place else 1
            x = _block(net, x, f"{stage + 2}.{place + 1}", 64 << stage, stride, as_published)
    net.linear(net.pool(x, "average", x.size, x.size), "fc", classes)
    halving = "first 1 × 1 convolution of a block, as published" if as_published else "3 × 3 convolution of a block"
    return net.shape(name, f"for inputs of 224 × 224; a block that halves the resolution does so in the {halving}")


def _block(net: Net, x: At, name: str, width: int, stride: int, first: bool) -> At:
    """A bottleneck block: 1 × 1 down, 3 × 3, 1 × 1 up to 4 × width, added to the input or its projection."""
    strides = (stride, 1) if first else (1, stride)
    y = net.conv(x, f"{name}.conv1", width, 1, strides[0], bias=False)
    y = net.relu(net.batch_norm(y, f"{name}.bn1"), f"{name}.relu1")
    y = net.conv(y, f"{name}.conv2", width, 3, strides[1], 1, bias=False)
    y = net.relu(net.batch_norm(y, f"{name}.bn2"), f"{name}.relu2")
    y = net.batch_norm(net.conv(y, f"{name}.conv3", 4 * width, 1, bias=False), f"{name}.bn3")
    if x.channels != y.channels:
        x = net.batch_norm(net.conv(x, f"{name}.project", 4 * width, 1, stride, bias=False), f"{name}.bn4")
    return net.relu(net.total([y, x], f"{name}.add"), f"{name}.relu3")
