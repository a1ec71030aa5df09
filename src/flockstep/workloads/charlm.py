"""A workload with a small language model of source code, which predicts the next character."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data, Job
from flockstep.optimizers.adam import AdamW
from flockstep.optimizers.base import Optimizer
from flockstep.workloads.base import Workload, require_at_least, require_module, tuned_job

SYMBOLS = 96
"""Number of symbols: the printable ASCII characters and the line feed; others are removed from the text."""

HELD_OUT, RUN = 16, 16
"""Number of stretches of text, evenly spaced, in the test set, and of consecutive windows in each."""


@dataclass(frozen=True)
class CharLM(Workload):
    """Predict each next character of the source of Python's standard library with a small transformer (108,864
    parameters).

    The text is the source of the top-level modules of the running Python, in alphabetical order, or the file `corpus`,
    up to `limit` printable characters. The text differs between versions of Python: its hash is in the job's facts, and
    `sha256` requires a given hash. The metric is the cross entropy in nats per character on held-out text. The
    optimizer has no momentum (beta1 = 0), because with momentum stale gradients cost much more accuracy. If `tied`, the
    output layer shares the weights of the embedding, and the model cannot be cut into stages.
    """

    batch: int = 8
    epochs: float = 0.85
    optimizer: Optimizer = AdamW(lr=0.002, beta1=0.0, beta2=0.99)
    target: float = 1.75
    corpus: str | None = None
    sha256: str | None = None
    limit: int = 2_000_000
    context: int = 64
    width: int = 64
    layers: int = 2
    heads: int = 4
    tied: bool = True

    def __post_init__(self) -> None:
        require_at_least(1, context=self.context, width=self.width, layers=self.layers, heads=self.heads)
        require_at_least(2 * HELD_OUT * RUN * self.context + 1, limit=self.limit)
        if self.width % self.heads:
            raise ConfigurationError(
                f"width must be a multiple of heads, got {self.width} and {self.heads}; use for example 64 and 4"
            )

    def job(self, seed: int) -> Job:
        require_module("torch", "torch", "the workload charlm")
        from flockstep.workloads import models

        codes = self._codes()  # read at once, because their hash is one of the job's facts
        digest = hashlib.sha256(codes.astype(np.uint8).tobytes()).hexdigest()
        if self.sha256 not in (None, digest):
            raise ConfigurationError(
                f"sha256 of the text must be {self.sha256}, got {digest}; set corpus to the text to which sha256 "
                "belongs"
            )
        sizes = (SYMBOLS, self.context, self.width, self.layers, self.heads, self.tied)
        return tuned_job(
            self,
            "charlm",
            model=lambda: models.seeded(seed, lambda: models.Transformer(*sizes)),
            data=lambda: windows(codes, self.context),
            loss=models.cross_entropy,
            metric=models.nats_per_character,
            higher_is_better=False,
            least_steps=800,
            facts={"text_sha256": digest},
        )

    def _codes(self) -> npt.NDArray[np.int64]:
        files = library() if self.corpus is None else [Path(self.corpus)]
        parts, size = [], 0
        for file in files:
            try:
                parts.append(encoded(file.read_bytes()))
            except OSError as problem:
                raise ConfigurationError(f"corpus must be a readable file, got {file} ({problem.strerror})") from None
            size += len(parts[-1])
            if size >= self.limit:
                break
        least = 2 * HELD_OUT * RUN * self.context + 1
        if size < least:
            raise ConfigurationError(
                f"corpus must hold >= {least} printable characters, got {size}; use a longer text or a shorter context"
            )
        return np.concatenate(parts)[: self.limit]


def library() -> list[Path]:
    """Return the paths of the top-level modules of Python's standard library, in alphabetical order."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def encoded(text: bytes) -> npt.NDArray[np.int64]:
    """Return the text as symbol numbers in range(96), the line feed last; other characters are removed."""
    raw = np.frombuffer(text, np.uint8)
    known = raw[((raw >= 32) & (raw < 127)) | (raw == 10)].astype(np.int64)
    return np.where(known == 10, SYMBOLS - 1, known - 32)


def windows(codes: npt.NDArray[np.int64], context: int) -> Data:
    """Return consecutive windows x (count, context) of the text, and y, the character that follows each character of x.
    Test and training windows do not overlap.
    """
    count = (len(codes) - 1) // context
    x = codes[: count * context].reshape(count, context)
    y = codes[1 : count * context + 1].reshape(count, context)
    starts = np.linspace(0, count - RUN, HELD_OUT).astype(np.int64)
    test = (starts[:, None] + np.arange(RUN)).ravel()
    train = np.setdiff1d(np.arange(count), test)
    return Data(x[train], y[train], x[test], y[test])
