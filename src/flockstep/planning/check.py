"""Prediction beside measurement: what a plan would have said about a run of which there is a record."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flockstep.costs.cluster import ClusterShape
from flockstep.costs.setting import Setting
from flockstep.costs.steps import NoForm, has_form, step_cost
from flockstep.drivers.setup import load_job
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import import_components
from flockstep.planning.fit import _by_worker, _first, _usual
from flockstep.planning.prospect import prospect
from flockstep.planning.rehearsal import STEPS, rehearse
from flockstep.planning.task import BATCH, Site, Task, task_of
from flockstep.records.config import RunConfig
from flockstep.records.events import Event, Step, Update
from flockstep.records.folder import RunFolder
from flockstep.report.prediction import Prediction
from flockstep.simulation import units
from flockstep.simulation.compute import ComputeModel
from flockstep.simulation.network import Ideal, Link, Network
from flockstep.strategies.base import Strategy


@dataclass(frozen=True)
class Figures:
    """A step of a worker, in the mean. Seconds and bytes."""

    seconds: float
    sent: float
    utilisation: float
    staleness: float | None


@dataclass(frozen=True)
class Check:
    """What was predicted, and what came of it."""

    job: str
    strategy: str
    workers: int
    cluster: str
    """What the prediction knew of the machines."""
    source: str
    """form or rehearsal."""
    predicted: Figures
    measured: Figures

    @property
    def error(self) -> float:
        """By which share of the measured seconds the prediction is too long."""
        return self.predicted.seconds / self.measured.seconds - 1

    @property
    def sent_error(self) -> float | None:
        """The same of bytes; None where none were sent."""
        return self.predicted.sent / self.measured.sent - 1 if self.measured.sent else None

    def document(self) -> dict[str, Any]:
        """As plain data."""
        rows = {name: vars(getattr(self, name)) for name in ("predicted", "measured")}
        names = ("job", "strategy", "workers", "cluster", "source", "error", "sent_error")
        return {**{name: getattr(self, name) for name in names}, **rows}


def check(folder: Path | str, cluster: ClusterShape | None = None) -> Check:
    """Predict the run whose record is in `folder`, and compare.

    A simulated run is predicted for its own network and compute law, unless a `cluster` is given.

    Raises:
        ConfigurationError: no record, one of a script or without steps, or a real run without a cluster.
    """
    record = RunFolder(Path(folder))
    config = record.read_config()
    if config.kind == "launch":
        raise ConfigurationError(f"{folder} is of a script, whose strategy is in no record; check a run of a job")
    if config.kind != "simulate" and cluster is None:
        raise ConfigurationError(f"{folder} is of real processes, whose machines are in no record; name a cluster")
    events = record.read_events()
    measured = measure(events, config.workers, str(folder))
    import_components(config.imports)
    strategy = Strategy.parse(config.strategy)
    batch = None if config.batch is None else int(config.batch)
    task = task_of(config.job, batch, load_job(config.job, config.seed))
    if cluster is None:
        predicted, source = _in_virtual_time(strategy, task, config)
        where = f"{config.network}, {config.compute}"
    else:
        found = prospect(strategy, Site(task, cluster), config.workers, steps=_rehearsed_steps(config))
        predicted = Figures(found.seconds, found.sent, found.utilisation, found.staleness)
        source, where = found.source, cluster.name
    return Check(task.name, config.strategy, config.workers, where, source, predicted, measured)


def for_report(folders: Sequence[Path], cluster: ClusterShape | None = None) -> list[Prediction | None]:
    """What a report shows beside each run: a prediction for `cluster`, or else that of a simulated run's closed form.

    None where there is neither, or nothing to compare it with. Without a cluster nothing but the record is looked at.
    """
    return [_told(RunFolder(folder), cluster) for folder in folders]


def _told(record: RunFolder, cluster: ClusterShape | None) -> Prediction | None:
    try:
        found = _by_form(record) if cluster is None else check(record.path, cluster)
    except (ConfigurationError, NoForm):
        return None
    if found is None:
        return None
    source = f"{'closed form' if found.source == 'form' else 'rehearsal'}, {found.cluster}"
    sent = found.predicted.sent, found.measured.sent
    return Prediction(found.predicted.seconds, found.measured.seconds, *sent, source)


def _by_form(record: RunFolder) -> Check | None:
    """A simulated run without mishaps, whose strategy and network have a closed form."""
    config = record.read_config()
    if config.kind != "simulate" or config.faults or not isinstance(_network(config), (Ideal, Link)):
        return None
    strategy = Strategy.parse(config.strategy)
    if not has_form(strategy):
        return None
    schema = record.read_result()[1]
    tensors = tuple(entry.shape for entry in schema.entries)
    task = Task(config.job, schema.size, tensors, schema.dtype, int(config.batch or BATCH))
    measured = measure(record.read_events(), config.workers)
    predicted, source = _in_virtual_time(strategy, task, config)
    where = f"{config.network or 'ideal'}, {config.compute}"
    return Check(task.name, config.strategy, config.workers, where, source, predicted, measured)


def measure(events: Sequence[Event], workers: int, where: str = "the record") -> Figures:
    """The figures of a run's events, those of its beginning left out.

    Raises:
        ConfigurationError: fewer than three steps of a worker.
    """
    steps = _by_worker(events, workers)
    length = min(map(len, steps))
    if length < 3:
        raise ConfigurationError(f"{where} must hold three steps or more of every worker, got {length}; run longer")
    counted = [one for mine in steps for one in mine[_first(length) :]]
    took = sum(one.compute + one.wait + one.comm for one in counted)
    late = [one.staleness for one in events if isinstance(one, Update) and one.staleness is not None]
    return Figures(
        _usual(steps, length),
        statistics.fmean(one.sent for one in counted),
        _busy(counted) / took if took else 1.0,
        statistics.fmean(late) if late else None,
    )


def _busy(steps: Sequence[Step]) -> float:
    return sum(one.compute for one in steps)


def _network(config: RunConfig) -> Network:
    return Network.parse(config.network or "ideal")


def _rehearsed_steps(config: RunConfig) -> int:
    """As many as the run had, if they are not too many."""
    return max(2, min(STEPS, int(config.steps or STEPS)))


def _in_virtual_time(strategy: Strategy, task: Task, config: RunConfig) -> tuple[Figures, str]:
    """A simulated run's, where nothing but gradients and messages takes time."""
    network, compute = _network(config), ComputeModel.parse(config.compute or "constant(0)")
    if isinstance(network, (Ideal, Link)):
        setting = Setting(
            config.workers,
            task.elements,
            compute,
            0.0 if isinstance(network, Ideal) else units.duration(network.latency, "latency"),
            math.inf if isinstance(network, Ideal) else units.bandwidth(network.bandwidth),
            dtype=task.dtype,
            tensors=task.tensors,
            batch=task.batch,
            slots=task.slots,
        )
        try:
            cost = step_cost(strategy, setting)
        except NoForm:
            pass
        else:
            return Figures(cost.seconds, cost.sent, cost.utilisation, cost.staleness), "form"
    found = rehearse(
        strategy,
        config.workers,
        task.nbytes,
        compute,
        network,
        tensors=task.sizes,
        dtype_bytes=task.itemsize,
        optimizer=task.optimizer,
        steps=_rehearsed_steps(config),
        seed=config.seed,
    )
    return Figures(found.seconds_per_step, found.sent_per_step, found.utilisation, found.staleness), "rehearsal"
