"""Trackio: stores a run in a local database, from which `trackio show` draws its curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.trackers.base import ExperimentTracker, Point, TrackedRun, package


@dataclass(frozen=True)
class Trackio(ExperimentTracker):
    """Trackio: stores a run of a `project` in Trackio's own folder."""

    project: str = "flockstep"

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        """Create a run in Trackio, with the settings as the run's configuration.

        Raises:
            MissingDependency: trackio is not installed.
        """
        trackio = package("trackio")
        return _TrackioRun(
            trackio.init(
                project=self.project,
                name=name,
                config=dict(settings),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        )


@dataclass(frozen=True)
class _TrackioRun(TrackedRun):
    run: Any

    def log(self, points: Sequence[Point]) -> None:
        for point in points:
            self.run.log({**point.named(), f"{point.group}/seconds": point.seconds}, step=point.step)

    def end(self, failed: bool) -> None:
        self.run.finish()
