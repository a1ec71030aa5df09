"""The shape of VGG-A (Simonyan & Zisserman 2014, table 1)."""

from __future__ import annotations

from flockstep.costs.builder import At, Net
from flockstep.costs.layers import ModelShape

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Numbers of channels of the 3 × 3 convolutions in each stage. A pooling layer ends each stage."""


def vgg_a(classes: int = 1000) -> ModelShape:
    """Return the shape of VGG-A: eight convolutions and three fully connected layers, with 132,863,336 parameters and
    7.6 G multiply-adds.
    """
    net, x = Net(), At(3, 224)
    for stage, widths in enumerate(STAGES, 1):
        for place, channels in enumerate(widths, 1):
            x = net.conv(x, f"conv{stage}_{place}", channels, 3, pad=1)
            x = net.relu(x, f"relu{stage}_{place}")
        x = net.pool(x, f"pool{stage}", 2, 2)
    for place in (6, 7):
        x = net.relu(net.linear(x, f"fc{place}", 4096), f"relu{place}")
    net.linear(x, "fc8", classes)
    return net.shape("vgg-a", "configuration A with 11 weight layers, for inputs of 224 × 224; dropout is left out")
