"""Finished trials in a file, one a line, so that the same command goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from flockstep import __version__
from flockstep.costs.cluster_writing import to_toml
from flockstep.errors import ConfigurationError
from flockstep.planning.trials import Bench, Trial

FILE = "trials.jsonl"
"""In the folder that was named: what the trials are of on the first line, then a trial a line."""


def settings_of(bench: Bench, workers: int, target: float, seed: int, split: str) -> dict[str, Any]:
    """What must be the same for a trial to have the same result, besides what the trial itself says."""
    site, task = bench.site, bench.site.task
    return {
        "flockstep": __version__,
        "job": task.name,
        "parameters": task.elements,
        "batch": task.batch,
        "optimizer": str(task.optimizer),
        "facts": dict(bench.job(seed).facts),
        "cluster": site.cluster.name,
        "cluster's description": hashlib.sha256(to_toml(site.cluster).encode()).hexdigest()[:16],
        "workers": workers,
        "target": target,
        "seed": seed,
        "split": split,
    }


@dataclass
class Kept:
    """The trials of a search, in memory and, where there is a folder, on disk as soon as they are finished."""

    settings: dict[str, Any]
    folder: Path | None = None
    _known: dict[tuple[str, float], tuple[Trial, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.folder is None:
            return
        if self._file.exists():
            self._read()
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file.write_text(json.dumps({"settings": self.settings}) + "\n", encoding="utf-8")

    def __len__(self) -> int:
        return len(self._known)

    def find(self, strategy: str, lr: float, within: float | None) -> Trial | None:
        """The same trial as finished earlier; one that was given less time than it would have now does not count."""
        trial, had = self._known.get((strategy, lr), (None, 0.0))
        short = trial is not None and trial.end == "time" and had < _seconds(within)
        return None if short else trial

    def add(self, trial: Trial, lr: float, within: float | None) -> None:
        """Keep a finished trial."""
        self._known[trial.strategy, lr] = trial, _seconds(within)
        if self.folder is not None:
            line = {"trial": trial.document(), "within": within, "lr": lr}
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    @property
    def _file(self) -> Path:
        assert self.folder is not None
        return self.folder / FILE

    def _read(self) -> None:
        text = self._file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # the last line of a process that was killed may be half a line
        try:
            first, *rest = map(json.loads, whole.splitlines())
            before = dict(first["settings"])
            for line in rest:
                trial = msgspec.convert(line["trial"], Trial)
                self._known[trial.strategy, line["lr"]] = trial, _seconds(line["within"])
        except (ValueError, KeyError, TypeError, msgspec.ValidationError):
            raise ConfigurationError(
                f"{self._file} must hold kept trials, got something else; give another folder"
            ) from None
        for name, value in self.settings.items():
            if before.get(name) != value:
                raise ConfigurationError(
                    f"{name} must be {before.get(name)} as of the trials kept in {self.folder}, got {value}; give "
                    "another folder with --keep"
                )
        if whole != text:
            self._file.write_text(whole, encoding="utf-8")


def _seconds(within: float | None) -> float:
    return math.inf if within is None else within
