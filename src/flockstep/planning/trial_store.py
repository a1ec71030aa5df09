"""Stores finished trials in a file, one per line, so that an interrupted search can be continued."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np

from flockstep import __version__
from flockstep.costs.cluster_file import to_toml
from flockstep.errors import ConfigurationError
from flockstep.frameworks.base import Data
from flockstep.planning.trials import Trial, TrialContext
from flockstep.runtime.setup import digest as digest_of_file

FILE = "trials.jsonl"
"""Name of the file with finished trials in a folder. The first line has the settings, and each further line has one
trial.
"""


def trial_settings(context: TrialContext, workers: int, target: float, seed: int, split: str) -> dict[str, Any]:
    """Return what the result of a trial depends on, besides the trial's own settings."""
    site, task, job = context.site, context.site.task, context.job(seed)
    return {
        "flockstep": __version__,
        "job": task.name,
        "job's file": None if task.file is None else digest_of_file(task.file),
        "job's data": digest(job.data()),
        "parameters": task.elements,
        "batch": task.batch,
        "epochs": job.epochs,
        "least_steps": job.least_steps,
        "metric": job.metric if isinstance(job.metric, str) else getattr(job.metric, "__name__", "metric"),
        "higher_is_better": job.higher_is_better,
        "optimizer": str(task.optimizer),
        "facts": dict(job.facts),
        "cluster": site.cluster.name,
        "cluster's description": hashlib.sha256(to_toml(site.cluster).encode()).hexdigest()[:16],
        "workers": workers,
        "target": target,
        "seed": seed,
        "split": split,
    }


def digest(data: Data) -> str:
    """Return the digest of all samples and labels, from numpy or torch: shapes, dtypes and every byte."""
    whole = hashlib.sha256()
    for values in (data.train_x, data.train_y, data.test_x, data.test_y):
        if hasattr(values, "detach"):
            import torch

            values = values.detach().cpu().contiguous()
            whole.update(f"{tuple(values.shape)} {values.dtype} ".encode())
            whole.update(values.view(torch.uint8).numpy().tobytes())
            continue
        array = np.ascontiguousarray(values)
        whole.update(f"{array.shape} {array.dtype} ".encode())
        whole.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return whole.hexdigest()[:16]


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the file: one trial."""

    trial: Trial
    lr: float
    within: float | None


@dataclass
class TrialStore:
    """The finished trials of a search, in memory and, if there is a folder, on disk."""

    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    _known: dict[tuple[str, float, int], tuple[Trial, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        try:
            if self._file.exists():
                self._read()
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file.write_text(json.dumps({"settings": self.settings}) + "\n", encoding="utf-8")
        except OSError as error:
            self._refuse(error)

    def find(self, strategy: str, lr: float, seed: int, within: float) -> Trial | None:
        """Return the stored result of a trial with equal settings; None if there is no such trial, or if it was limited
        to less than `within` virtual seconds.
        """
        trial, had = self._known.get((strategy, lr, seed), (None, 0.0))
        short = trial is not None and trial.end == "time" and had < within
        return None if short else trial

    def add(self, trial: Trial, lr: float, within: float) -> None:
        """Add the result of a finished trial to the store."""
        self._known[trial.strategy, lr, trial.seed] = trial, within
        if self.folder is not None:
            line = {"trial": asdict(trial), "within": within if math.isfinite(within) else None, "lr": lr}
            try:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:
                self._refuse(error)

    @property
    def _file(self) -> Path:
        assert self.folder is not None
        return self.folder / FILE

    def _refuse(self, error: OSError) -> NoReturn:
        raise ConfigurationError(
            f"cannot save trials in {self.folder}: {error.strerror}; name another folder with --keep"
        ) from None

    def _read(self) -> None:
        data = self._file.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # the last line of a killed process may be incomplete
        try:
            first, *rest = map(json.loads, whole.decode().split("\n")[:-1])
            before = dict(first["settings"])
            for line in rest:
                one = msgspec.convert(line, _Line)
                within = math.inf if one.within is None else one.within
                self._known[one.trial.strategy, one.lr, one.trial.seed] = one.trial, within
        except (ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError):
            raise ConfigurationError(
                f"{self._file} must hold saved trials, got something else; give another folder with --keep"
            ) from None
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise ConfigurationError(
                    f"{name} must be {before.get(name)}, as in the trials stored in {self.folder}, "
                    f"got {value}; give another folder with --keep"
                )
        if whole != data:
            self._file.write_bytes(whole)
