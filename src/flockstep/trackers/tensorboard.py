"""TensorBoard: writes an event file that `tensorboard --logdir` shows, even while the run is in progress."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.trackers.base import ExperimentTracker, Point, TrackedRun, package


@dataclass(frozen=True)
class TensorBoard(ExperimentTracker):
    """TensorBoard: writes an event file to a folder with the run's name, within `folder`. Settings are not stored."""

    folder: str = "tensorboard"

    @property
    def place(self) -> str:
        return f"the folder {self.folder}; tensorboard --logdir {shlex.quote(self.folder)} shows the curves"

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        """Create the event file of a run.

        Raises:
            ConfigurationError: the folder holds an event file, whose curves would be mixed with the curves of this run.
            MissingDependency: tensorboard is not installed.
        """
        summary, folder = package("tensorboard.summary"), Path(self.folder) / name
        if any(folder.glob("events.out.tfevents.*")):
            raise ConfigurationError(
                f"{folder} holds the curves of another run; remove the folder, or choose another folder"
            )
        return _Events(summary.Writer(str(folder)), started)


@dataclass(frozen=True)
class _Events(TrackedRun):
    writer: Any
    started: float

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.named().items():
                self.writer.add_scalar(name, value, point.step, wall_time=self.started + point.seconds)
        self.writer.flush()

    def end(self, failed: bool) -> None:
        self.writer.close()
