"""Milliseconds per gradient of a job that reads images from files, with the next batch read in advance and without.

JPEG files are written to a temporary folder, decoded by Pillow and resized; the network is so small that reading a
batch takes about as long as its gradient. Both ways take turns in one process with one thread for torch, so that
whatever else the machine does hits both alike.

    python benchmarks/prefetch.py [--seconds 60]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import nn

import flockstep
from flockstep.frameworks.base import Engine
from flockstep.frameworks.job import make_engine
from flockstep.workloads.readers import ImageFolder

BATCH, SEGMENT = 16, 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        engine = make_engine(job(folder), 0)
        end, taken = time.monotonic() + options.seconds, {True: list[float](), False: list[float]()}
        milliseconds(engine, True)
        while time.monotonic() < end:
            for ahead, times in taken.items():
                times.append(milliseconds(engine, ahead))
    for ahead, times in taken.items():
        print(f"{'in advance' if ahead else 'when needed'}: {statistics.median(times):.4g} ms, least {min(times):.4g}")
    print(f"median ratio {statistics.median(a / b for a, b in zip(taken[True], taken[False], strict=True)):.3g}")


def write_images(folder: Path) -> None:
    """Write 240 images of 288 x 288 pixels in four classes."""
    random = np.random.default_rng(0)
    for number in range(240):
        pixels = np.kron(random.integers(0, 256, (12, 12, 3), np.uint8), np.ones((24, 24, 1), np.uint8))
        kind = folder / f"class{number % 4}"
        kind.mkdir(exist_ok=True)
        Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(3)).save(kind / f"{number}.jpg", quality=90)


def job(folder: str) -> flockstep.Job:
    """A small convolutional network on the images of a folder."""
    images = ImageFolder(folder, (96, 96))
    return flockstep.Job(
        model=lambda: nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(48, 4),
        ),
        data=lambda: flockstep.Data.of(images, images),
        optimizer="sgd(lr=0.05)",
        loss=nn.functional.cross_entropy,
        batch=BATCH,
    )  # fmt: skip


def milliseconds(engine: Engine, ahead: bool) -> float:
    """Milliseconds of a gradient in a segment of `SEGMENT` gradients on batches that were not read before."""
    random, params = np.random.default_rng(), engine.initial()
    out = np.empty_like(params)
    batches = [random.choice(engine.train_size, BATCH, replace=False) for _ in range(SEGMENT + 1)]
    engine.gradient(params, batches[0], out)
    begin = time.perf_counter()
    for now, following in pairwise(batches):
        if ahead:
            engine.prefetch(now)
            engine.prefetch(following)
        engine.gradient(params, now, out)
    taken = time.perf_counter() - begin
    engine.gradient(params, batches[-1], out)  # ends the reading
    return 1000 * taken / SEGMENT


if __name__ == "__main__":
    main()
