"""Data of the jobs that are sealed in tests, and their files."""

from __future__ import annotations

import io
import keyword
import tokenize
from pathlib import Path

import numpy as np

from flockstep.frameworks.base import Data

WORDS, LENGTH = 24, 12


def image_data() -> Data:
    draw = np.random.default_rng(1)
    y = draw.integers(0, 10, 160)
    x = (draw.random((160, 1, 8, 8)) * 0.3 + y[:, None, None, None] / 14).astype(np.float32)
    return Data(x[:128], y[:128], x[128:], y[128:])


def text_data() -> Data:
    draw = np.random.default_rng(2)
    x = (np.cumsum(draw.integers(1, 3, (160, LENGTH + 1)), 1) % WORDS).astype(np.int64)
    return Data(x[:128, :-1], x[:128, 1:], x[128:, :-1], x[128:, 1:])


def write_data(folder: Path, data: Data) -> Path:
    """Write data as a customer has them; return the folder."""
    folder.mkdir()
    for name in ("train_x", "train_y", "test_x", "test_y"):
        np.save(folder / f"{name}.npy", getattr(data, name))
    return folder


def write_job(folder: Path, name: str, module: str = "sealed_jobs") -> Path:
    """Write a job file; return its path."""
    file = folder / f"{name}_job.py"
    file.write_text(f"from support.{module} import {name} as job\n")
    return file


def words_of(source: str) -> set[str]:
    """Names in the source of the jobs that nothing but the source would tell."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    names = {one.string for one in tokens if one.type == tokenize.NAME and len(one.string) > 3}
    return names - set(keyword.kwlist)
