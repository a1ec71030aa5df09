"""Stages whose processes never hold the whole model: shapes for all of it, values for one part."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flockstep.errors import ConfigurationError
from flockstep.partitions.pipeline import Pipeline
from flockstep.split.splitting import without_whole
from flockstep.split.stages import MicroBatch, SplitModel
from flockstep.split.torch_stages import PartsEngine, SkeletonEngine, split_torch
from support.split_job import model as normalized
from support.split_jobs import chain, job_of

PIPELINE = Pipeline(2, microbatches=2)


class Scaled(nn.Linear):
    """A layer that is created from a value: without values it would be another layer."""

    def __init__(self) -> None:
        super().__init__(6, 6, dtype=torch.float64)
        with torch.device("cpu"):
            self.scale = float(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x)


class Constants(nn.Module):
    """A layer with a frozen parameter, a buffer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.rand(6, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(x * self.frozen * self.mask)
        return out


def started(first: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The chain behind another layer."""

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(first(), *chain())

    return model


def stepped(split: SplitModel, known: SplitModel) -> list[np.ndarray]:
    """The gradients of the parts for one micro-batch at the first parameters of `known`, and the buffers afterwards."""
    batch = MicroBatch(0, 3, 1, np.arange(4), 1.0)
    gradients = [np.zeros(part.schema.size, part.schema.dtype) for part in split.parts]
    between = None
    for part, first in zip(split.parts, known.parts, strict=True):
        between, _ = part.forward(0, first.initial(), batch, between)
    for part, out in reversed(list(zip(split.parts, gradients, strict=True))):
        between = part.backward(0, batch, between, out)
    return [*gradients, *(part.buffers(0) for part in split.parts)]


@pytest.mark.parametrize("model", [chain, normalized, started(Constants)])
def test_a_part_without_the_whole_model_computes_its_bits(model: Callable[[], nn.Module]) -> None:
    job = job_of(model)
    known = without_whole(job, 0, split_torch(job, 0, PIPELINE))
    assert known.facts.obstacle == ""
    bare = split_torch(job, 0, PIPELINE, known.facts)
    assert isinstance(bare.engine, PartsEngine)
    assert isinstance(bare.engine.whole, SkeletonEngine)
    assert all(one.is_meta for one in bare.engine.whole.module.parameters()), "no memory for values"
    for ours, theirs in zip(bare.parts, known.parts, strict=True):
        assert ours.take(theirs.values()).tobytes() == theirs.initial().tobytes()
        assert ours.held_bytes == theirs.held_bytes < sum(part.held_bytes for part in known.parts)
    for found, expected in zip(stepped(bare, known), stepped(known, known), strict=True):
        assert found.tobytes() == expected.tobytes()


class Measured(nn.Linear):
    """A layer whose constructor reads a value."""

    def __init__(self) -> None:
        super().__init__(6, 6, dtype=torch.float64)
        self.scale = self.weight.sum().item()


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (Scaled, "the model does not give the same results .* filled in later, got a loss of .*; do not compute"),
        (
            Measured,
            r"building the model without values raised RuntimeError: .*item\(\).*; do not compute with values in",
        ),
    ],
)
def test_a_model_that_needs_values_to_be_built_is_built_whole(first: Callable[[], nn.Module], reason: str) -> None:
    job = job_of(started(first))
    known = without_whole(job, 0, split_torch(job, 0, PIPELINE))
    assert re.match(reason, known.facts.obstacle), known.facts.obstacle
    whole = split_torch(job, 0, PIPELINE, known.facts)
    for found, expected in zip(stepped(whole, known), stepped(known, known), strict=True):
        assert found.tobytes() == expected.tobytes()


def test_a_part_of_another_model_is_refused() -> None:
    job = job_of()
    known = split_torch(job, 0, PIPELINE)
    with pytest.raises(ConfigurationError, match=r"the values of a part must have .* bytes, got .*; build the same"):
        known.parts[0].take(known.parts[1].values())
