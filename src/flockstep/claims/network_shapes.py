"""Shapes of the tensors of well-known networks, for claims that need nothing else of them."""

from __future__ import annotations

from flockstep.codecs.base import Shape


def resnet18(classes: int = 10) -> list[Shape]:
    """ResNet-18 for images of 32 × 32 (He et al. 2016, with a first convolution of 3 × 3): 11,173,962 parameters."""
    shapes: list[Shape] = _normalised(64, 3, 3)
    inputs = 64
    for width in (64, 128, 256, 512):
        for _ in range(2):
            shapes += _normalised(width, inputs, 3) + _normalised(width, width, 3)
            if inputs != width:
                shapes += _normalised(width, inputs, 1)
            inputs = width
    return [*shapes, (classes, inputs), (classes,)]


def _normalised(outputs: int, inputs: int, side: int) -> list[Shape]:
    """A convolution without bias, then batch normalisation."""
    return [(outputs, inputs, side, side), (outputs,), (outputs,)]


def lstm(words: int = 33278, units: int = 650, layers: int = 3) -> list[Shape]:
    """A language model whose output layer shares the embedding's matrix and has a bias: 31,819,578 parameters."""
    layer: list[Shape] = [(4 * units, units), (4 * units, units), (4 * units,), (4 * units,)]
    return [(words, units), *layer * layers, (words,)]
