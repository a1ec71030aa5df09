"""Weights & Biases: stores a run on the server, or in a folder that `wandb sync` uploads later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flockstep.trackers.base import ExperimentTracker, Point, TrackedRun, package


@dataclass(frozen=True)
class WeightsAndBiases(ExperimentTracker):
    """Weights & Biases: stores a run of a `project`; unless `online`, the run stays in `folder`."""

    project: str = "flockstep"
    mode: Literal["online", "offline"] = "offline"
    folder: str = "wandb"

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        """Create a run in Weights & Biases, with the settings as the run's configuration.

        Raises:
            MissingDependency: wandb is not installed.
        """
        wandb = package("wandb")
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        run = wandb.init(
            project=self.project,
            name=name,
            mode=self.mode,
            dir=self.folder,
            config=dict(settings),
            reinit="create_new",
            settings=wandb.Settings(silent=True, x_disable_stats=True),
        )
        return _WandbRun(run)


@dataclass(frozen=True)
class _WandbRun(TrackedRun):
    run: Any
    groups: set[str] = field(default_factory=set)

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            axis = f"{point.group}/step"
            if point.group not in self.groups:  # each group has steps of its own
                self.groups.add(point.group)
                self.run.define_metric(axis, hidden=True)
                self.run.define_metric(f"{point.group}/*", step_metric=axis)
            self.run.log({**point.named(), axis: point.step, f"{point.group}/seconds": point.seconds})

    def end(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
