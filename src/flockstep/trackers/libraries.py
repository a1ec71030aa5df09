"""Experiment trackers: what TensorBoard, MLflow, Weights & Biases and Trackio are told of a run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flockstep.errors import ConfigurationError
from flockstep.trackers.base import ExperimentTracker, Point, TrackedRun, package

BATCH = 1000
"""Largest number of values in one call of MLflow's interface."""
LONGEST = 500
"""Number of characters after which the text of an MLflow parameter is cut off."""


@dataclass(frozen=True)
class _LibraryRun:
    """A run in a tracker, as the two calls in which the trackers differ."""

    log: Callable[[Sequence[Point]], object]
    end: Callable[[bool], object]


@dataclass(frozen=True)
class TensorBoard(ExperimentTracker):
    """TensorBoard: writes an event file to a folder with the run's name, within `folder`. Settings are not stored."""

    folder: str = "tensorboard"

    @property
    def place(self) -> str:
        return f"the folder {self.folder}; tensorboard --logdir {shlex.quote(self.folder)} shows the curves"

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        summary, folder = package("tensorboard.summary"), Path(self.folder) / name
        if any(folder.glob("events.out.tfevents.*")):  # their curves would be mixed with those of this run
            raise ConfigurationError(
                f"{folder} holds the curves of another run; remove the folder, or choose another folder"
            )
        writer = summary.Writer(str(folder))

        def log(points: Sequence[Point]) -> None:
            for point in points:
                for curve, value in point.named().items():
                    writer.add_scalar(curve, value, point.step, wall_time=started + point.seconds)
            writer.flush()

        return _LibraryRun(log, lambda failed: writer.close())


@dataclass(frozen=True)
class MLflow(ExperimentTracker):
    """MLflow: stores a run of an `experiment` in the database, or on the tracking server, at `uri`."""

    uri: str = "sqlite:///mlflow.db"
    experiment: str = "flockstep"

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        mlflow = package("mlflow")  # the smaller package mlflow-skinny is sufficient
        client = mlflow.MlflowClient(tracking_uri=self.uri)
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        run = client.create_run(experiment, run_name=name, start_time=round(1000 * started)).info.run_id
        for key, value in settings.items():
            client.log_param(run, key, value[:LONGEST])

        def log(points: Sequence[Point]) -> None:
            metrics = [
                mlflow.entities.Metric(curve, value, round(1000 * (started + point.seconds)), point.step)
                for point in points
                for curve, value in point.named().items()
            ]
            for first in range(0, len(metrics), BATCH):
                client.log_batch(run, metrics=metrics[first : first + BATCH])

        return _LibraryRun(log, lambda failed: client.set_terminated(run, "FAILED" if failed else "FINISHED"))


@dataclass(frozen=True)
class WeightsAndBiases(ExperimentTracker):
    """Weights & Biases: stores a run of a `project`; unless `online`, the run stays in `folder`."""

    project: str = "flockstep"
    mode: Literal["online", "offline"] = "offline"
    folder: str = "wandb"

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
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
        groups = set[str]()

        def log(points: Sequence[Point]) -> None:
            for point in points:
                axis = f"{point.group}/step"
                if point.group not in groups:  # each group has steps of its own
                    groups.add(point.group)
                    run.define_metric(axis, hidden=True)
                    run.define_metric(f"{point.group}/*", step_metric=axis)
                run.log({**point.named(), axis: point.step, f"{point.group}/seconds": point.seconds})

        return _LibraryRun(log, lambda failed: run.finish(exit_code=int(failed)))


@dataclass(frozen=True)
class Trackio(ExperimentTracker):
    """Trackio: stores a run of a `project` in Trackio's own folder."""

    project: str = "flockstep"

    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        run = package("trackio").init(
            project=self.project,
            name=name,
            config=dict(settings),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

        def log(points: Sequence[Point]) -> None:
            for point in points:
                run.log({**point.named(), f"{point.group}/seconds": point.seconds}, step=point.step)

        return _LibraryRun(log, lambda failed: run.finish())
