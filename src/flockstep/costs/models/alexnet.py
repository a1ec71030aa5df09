"""The shape of AlexNet (Krizhevsky, Sutskever & Hinton 2012)."""

from __future__ import annotations

from flockstep.costs.builder import At, Net
from flockstep.costs.layers import ModelShape

NOTE = (
    "with two towers (groups of filters) as published, for inputs of 227 × 227; local response normalization and "
    "dropout are left out"
)


def alexnet(classes: int = 1000) -> ModelShape:
    """Return the shape of AlexNet: five convolutions and three fully connected layers, with 60,965,224 parameters and
    724 M multiply-adds.
    """
    net = Net()
    x = net.relu(net.conv(At(3, 227), "conv1", 96, 11, stride=4), "relu1")
    x = net.pool(x, "pool1", 3, 2)
    x = net.relu(net.conv(x, "conv2", 256, 5, pad=2, groups=2), "relu2")
    x = net.pool(x, "pool2", 3, 2)
    x = net.relu(net.conv(x, "conv3", 384, 3, pad=1), "relu3")
    x = net.relu(net.conv(x, "conv4", 384, 3, pad=1, groups=2), "relu4")
    x = net.relu(net.conv(x, "conv5", 256, 3, pad=1, groups=2), "relu5")
    x = net.pool(x, "pool5", 3, 2)
    x = net.relu(net.linear(x, "fc6", 4096), "relu6")
    x = net.relu(net.linear(x, "fc7", 4096), "relu7")
    net.linear(x, "fc8", classes)
    return net.shape("alexnet", NOTE)
