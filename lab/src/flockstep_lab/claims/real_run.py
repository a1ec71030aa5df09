"""Trains on real processes in a temporary folder, for the claims that measure processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from flockstep.launchers.train import train
from flockstep.records.config import RunConfig
from flockstep.records.events import Event
from flockstep.records.folder import RunFolder


def events_of(job: str, strategy: str, workers: int, steps: int, **settings: Any) -> list[Event]:
    """Train on real processes, and return all events of the run, sorted by time.

    `job` is a workload, or the text of a Python file with a function `job()`. `settings` are further fields of the
    run's configuration.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file, folder = Path(scratch) / "job.py", Path(scratch) / "run"
        if "\n" in job:
            file.write_text(job, "utf-8")
            job = str(file)
        train(RunConfig(kind="train", job=job, strategy=strategy, workers=workers, steps=steps, **settings), folder)
        return RunFolder(folder).read_events()
