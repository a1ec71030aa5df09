"""Convolutions before split layers, for replicas that PyTorch divides over processes."""

from __future__ import annotations

import torch
from torch import nn

import support.compiler  # noqa: F401
from flockstep.frameworks.base import Job
from support.images_job import CLASSES, images


def bare(biases: bool = True) -> nn.Sequential:
    """Convolutions whose channels two and four ways divide, and one pair, whose second layer has no bias."""
    torch.manual_seed(0)
    front = nn.Conv2d(1, 4, 3, bias=biases), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=biases), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*front, nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES, bias=False)).double()


def job() -> Job:
    """The job of this file, for runs of processes."""
    return images(bare)
