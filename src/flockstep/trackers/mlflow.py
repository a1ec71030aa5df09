"""MLflow: stores a run in a database or on a tracking server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flockstep.trackers.base import ExperimentTracker, Point, TrackedRun, package

BATCH = 1000
"""Largest number of values in one call of MLflow's interface."""
LONGEST = 500
"""Number of characters after which the text of an MLflow parameter is cut off."""


@dataclass(frozen=True)
class MLflow(ExperimentTracker):
    """MLflow: stores a run of an `experiment` in the database, or on the tracking server, at `uri`."""

    uri: str = "sqlite:///mlflow.db"
    experiment: str = "flockstep"

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        """Create a run in MLflow, with the settings as the run's parameters.

        Raises:
            MissingDependency: MLflow is not installed; the smaller package mlflow-skinny is sufficient.
        """
        mlflow = package("mlflow")
        client = mlflow.MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=name, start_time=_milliseconds(started)).info.run_id
        for key, value in settings.items():
            client.log_param(run, key, value[:LONGEST])
        return _MLflowRun(mlflow.entities.Metric, client, run, started)


@dataclass(frozen=True)
class _MLflowRun(TrackedRun):
    metric: Any
    client: Any
    run: str
    started: float

    def log(self, points: Sequence[Point]) -> None:
        metrics = [
            self.metric(name, value, _milliseconds(self.started + point.seconds), point.step)
            for point in points
            for name, value in point.named().items()
        ]
        for first in range(0, len(metrics), BATCH):
            self.client.log_batch(self.run, metrics=metrics[first : first + BATCH])

    def end(self, failed: bool) -> None:
        self.client.set_terminated(self.run, "FAILED" if failed else "FINISHED")


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)
