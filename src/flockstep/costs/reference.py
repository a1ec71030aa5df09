"""Reference models: the shapes of networks that papers on distributed training use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flockstep.costs.layers import ModelShape
from flockstep.costs.models.alexnet import alexnet
from flockstep.costs.models.googlenet import googlenet
from flockstep.costs.models.gpt import gpt_2_small
from flockstep.costs.models.resnet import resnet_50, resnet_152
from flockstep.costs.models.vgg import vgg_a
from flockstep.errors import UnknownName


@dataclass(frozen=True)
class Reference:
    """A reference model with its published numbers of parameters and of multiply-adds of one forward pass."""

    build: Callable[[], ModelShape]
    parameters: float
    multiply_adds: float
    source: str


MODELS = {
    "alexnet": Reference(alexnet, 61e6, 0.72e9, "Krizhevsky et al. 2012: 60 million parameters"),
    "vgg-a": Reference(vgg_a, 132.9e6, 7.6e9, "Simonyan & Zisserman 2014, table 2: 133 million parameters"),
    "googlenet": Reference(googlenet, 6.8e6, 1.5e9, "Szegedy et al. 2014, quoted as 6.8 million parameters"),
    "resnet-50": Reference(
        resnet_50,
        25.6e6,
        4.1e9,
        "He et al. 2015, table 1: 3.8e9 multiply-adds, with the resolution halved as published",
    ),
    "resnet-152": Reference(
        resnet_152,
        60.2e6,
        11.5e9,
        "He et al. 2015, table 1: 11.3e9 multiply-adds, with the resolution halved as published",
    ),
    "gpt-2-small": Reference(gpt_2_small, 124e6, 145.8e9, "Radford et al. 2019: 124 million parameters as released"),
}
"""The reference models of the literature: name → network."""


def reference(name: str) -> ModelShape:
    """Return the shape of the reference model called `name`.

    Raises:
        UnknownName: there is no such model.
    """
    if name not in MODELS:
        raise UnknownName.among("reference model", name, MODELS)
    return MODELS[name].build()
