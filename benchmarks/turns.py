"""Ways to train that take turns in the same processes, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

Step = Callable[[], None]


def take_turns(ways: Mapping[str, Step], steps: Mapping[str, int], rounds: int) -> dict[str, list[float]]:
    """Way → milliseconds per step, one figure for each round of `steps` steps of every way."""
    names, times = list(ways), {name: list[float]() for name in ways}
    for number in range(rounds + 1):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps[name]):
                ways[name]()
            dist.barrier()
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - begin) * 1000 / steps[name])
    return times


def write_figures(out: Path, times: Mapping[str, list[float]], ours: str = "flockstep") -> None:
    """Write the medians over rounds, and the median of the rounds' own ratios of `ours` to DDP, as JSON."""
    ratios = [own / theirs for own, theirs in zip(times[ours], times["ddp"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    out.write_text(json.dumps({**medians, "ratio": statistics.median(ratios)}))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Step:
    """A function that trains a classifier for one step on one batch."""
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        loss_fn(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
