"""The models of the benchmark of step times have the sizes of those that they are named after."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from flockstep.arrays.memory import release
from support.benchmarks import benchmark
from support.processes import PATIENCE, wait_until


@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11_689_512), ("gpt2", 124_439_808)])
def test_models_have_the_published_numbers_of_parameters(name: str, parameters: int) -> None:
    """Those of torchvision's resnet18, and of GPT-2 small, whose output layer shares its embedding's weights."""
    chosen = benchmark("large_models").MODELS[name]
    with torch.device("meta"):
        model = chosen.build()
        x, y = chosen.data(2)
        loss = torch.nn.functional.cross_entropy(model(x), y)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert loss.shape == ()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_that_is_written_counts(tmp_path: Path) -> None:
    peaks = benchmark("peaks")
    release()  # otherwise this process may free memory while it is watched
    peaks.ready(tmp_path)
    with peaks.watching(tmp_path) as found:
        block = bytearray(b"x") * (64 << 20)
        most = 0.9 * len(block)  # what this process frees in the meantime is taken off
        wait_until(lambda: min(found.values()) >= most, PATIENCE, "both peaks count the block")
    assert max(found.values()) < 2 * len(block)  # counted once
