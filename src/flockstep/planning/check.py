"""Compares the prediction of a plan with the measurements of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flockstep.costs.cluster import ClusterShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import import_components
from flockstep.nodes import Hosts
from flockstep.planning.evaluations import EvaluationTraffic, evaluation_traffic
from flockstep.planning.fit import first_counted, hosts_in, shortest, steps_by_worker, usual_seconds
from flockstep.planning.job_profile import BATCH, JobProfile, Site, task_of
from flockstep.planning.record_imports import NotAskedFor, trusted
from flockstep.planning.rehearsal import STEPS, Conditions, rehearse
from flockstep.planning.step_prediction import StepPrediction, predict_step
from flockstep.planning.words import short
from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent, Event, StepEvent, UpdateEvent
from flockstep.records.folder import RunFolder
from flockstep.report.formatting import NONE, number, seconds, size
from flockstep.report.prediction import Prediction
from flockstep.report.terminal import TableColumn, TextTable
from flockstep.runtime.setup import load_job
from flockstep.simulation.compute import ComputeModel, SharedCores
from flockstep.simulation.law import mean_of
from flockstep.simulation.network import Network
from flockstep.strategies.base import Strategy

EVERYONES = 1000
"""Largest number of steps, of all workers together, in the rehearsal of a simulated run. The rehearsal repeats the
random draws of the run.
"""
FEW = 16
"""Largest number of workers of a simulated run that a report rehearses."""
APART = 1.2
"""Ratio of predicted and measured gradient times above which the error of a prediction is also given for equal gradient
times.
"""


@dataclass(frozen=True)
class Figures:
    """Mean duration, bytes and further figures of a worker's step, predicted or measured."""

    seconds: float
    sent_bytes: float
    utilization: float
    staleness: float | None
    rate: float | None = None
    """Samples per second of all workers together until the end of the last step, including samples whose gradients were
    not applied.
    """
    gradient: float = 0.0
    """Usual duration of a gradient in seconds; 0 if the duration cannot be separated from waiting for a core."""


@dataclass(frozen=True)
class Check:
    """Predicted and measured figures of one run."""

    job: str
    strategy: str
    workers: int
    cluster: str
    """Name of the cluster, or of the simulated network, on which the prediction is based."""
    source: str
    """Text that says how the prediction was obtained: from a closed form or from a rehearsal."""
    predicted: Figures
    measured: Figures
    gradient_seconds: float | None = None
    """Predicted seconds of a step if gradients take as long as in the run; None if `predicted` already assumes a
    similar time.
    """
    notes: tuple[str, ...] = ()
    """Sentences about differences between the conditions of prediction and measurement."""

    @property
    def error(self) -> float:
        """Relative error of the predicted step time: positive if the prediction is too long."""
        return self.predicted.seconds / self.measured.seconds - 1

    @property
    def error_besides_gradients(self) -> float:
        """Relative error of the predicted step time if gradients take as long as in the run."""
        return (self.gradient_seconds or self.predicted.seconds) / self.measured.seconds - 1

    @property
    def sent_error(self) -> float | None:
        """Relative error of the predicted bytes per step; None if the run sent no bytes."""
        return self.predicted.sent_bytes / self.measured.sent_bytes - 1 if self.measured.sent_bytes else None

    @property
    def rate_error(self) -> float | None:
        """Relative error of the predicted samples per second; None if the predicted or the measured value is
        unknown.
        """
        return self.predicted.rate / self.measured.rate - 1 if self.predicted.rate and self.measured.rate else None

    def document(self) -> dict[str, Any]:
        """Return the comparison as plain data, for JSON."""
        rows = {name: vars(getattr(self, name)) for name in ("predicted", "measured")}
        names = ("job", "strategy", "workers", "cluster", "source", "error", "sent_error", "rate_error", "notes")
        own = {"error_besides_gradients": self.error_besides_gradients}
        return {**{name: getattr(self, name) for name in names}, **own, **rows}


def check(folder: Path | str, cluster: ClusterShape | None = None, imports: Sequence[str] = ()) -> Check:
    """Predict the run whose record is in `folder`, and compare the prediction with the record.

    Args:
        folder: folder of the record.
        cluster: the machines of the run; a simulated run is otherwise predicted for its own network and compute model.
        imports: the Python files that the record may need, including its job's file; no other file is executed.

    Returns:
        The predicted and the measured figures of a step.

    Raises:
        ConfigurationError: there is no record; the record has no steps, or belongs to a script or to a run with a
            partition; or the run was real and no cluster is given.
    """
    record = RunFolder(Path(folder))
    config = record.read_config()
    if config.kind == "launch":
        raise ConfigurationError(
            f"{folder} is the record of a script, which does not name the strategy; check a run of a job"
        )
    if config.partition is not None:
        raise ConfigurationError(
            f"{folder} is the record of a run of a split model, {config.partition}, and only whole replicas are "
            f"compared with a prediction; predict split replicas with flockstep plan --partition, and check a run with "
            "partition=none"
        )
    if config.kind != "simulate" and cluster is None:
        raise ConfigurationError(
            f"{folder} is the record of a run on real processes, which does not describe the machines; name a cluster "
            "with --cluster, such as the file that flockstep calibrate --from writes"
        )
    events = record.read_events()
    measured, hosts = measure(events, config.workers, str(folder)), hosts_in(events)
    config = trusted(config, folder, imports)
    import_components(config.imports)
    strategy = Strategy.parse(config.strategy)
    batch = None if config.batch is None else int(config.batch)
    task = task_of(config.job, batch, load_job(config.job, config.seed))
    own = None
    if cluster is None:
        predicted, source = _in_virtual_time(strategy, task, config), "rehearsal"
        where, notes = f"{config.network}, {config.compute}", tuple[str, ...]()
    else:
        site = Site(task, cluster)
        traffic = evaluation_traffic(config, hosts, task.nbytes, cluster)
        found = predict_step(strategy, site, config.workers, steps=_rehearsed_steps(config))
        with_evaluations = _longer(found, traffic)
        predicted = Figures(
            with_evaluations.seconds,
            found.sent_bytes,
            with_evaluations.utilization,
            found.staleness,
            _all_samples(config, task, with_evaluations.seconds),
            _gradient_of(site.compute(config.workers)),
        )
        source, where, notes = "rehearsal", cluster.name, (*_unlike(config, site), *_elsewhere(hosts, site.cluster))
        if traffic is not None:
            notes = (*notes, traffic.sentence(found, with_evaluations.seconds - found.seconds))
        ratio = measured.gradient / predicted.gradient if measured.gradient and predicted.gradient else 1.0
        if max(ratio, 1 / ratio) > APART:
            slower = replace(site, cluster=_slowed(cluster, ratio))
            there = predict_step(strategy, slower, config.workers, steps=_rehearsed_steps(config))
            own = _longer(there, traffic).seconds
            notes = (*notes, _other_gradients(predicted, measured, cluster.name, config.title, own))
    return Check(task.name, config.title, config.workers, where, source, predicted, measured, own, notes)


def _longer(found: StepPrediction, traffic: EvaluationTraffic | None) -> StepPrediction:
    """The prediction with the time that models for evaluation add to a step."""
    if traffic is None or not found.seconds > 0:
        return found
    seconds = found.seconds + traffic.longer(found)
    return replace(found, seconds=seconds, utilization=found.utilization * found.seconds / seconds)


def _gradient_of(law: ComputeModel) -> float:
    """Mean seconds of a gradient; 0 if workers also wait for cores meanwhile."""
    return 0.0 if isinstance(law, SharedCores) else mean_of(law)


def _slowed(cluster: ClusterShape, ratio: float) -> ClusterShape:
    """The cluster with gradients that take `ratio` times as long."""
    return replace(cluster, groups=tuple(replace(group, speed=group.speed / ratio) for group in cluster.groups))


def _other_gradients(predicted: Figures, measured: Figures, name: str, strategy: str, own: float) -> str:
    """A note about gradients that took longer or shorter than the cluster's."""
    return (
        f"a gradient of {strategy} took {seconds(measured.gradient)} in the run and takes "
        f"{seconds(predicted.gradient)} on {name}: with the gradients of the run a step is predicted to take "
        f"{seconds(own)}, an error of {_told_error(own / measured.seconds - 1)}"
    )


def _all_samples(config: RunConfig, task: JobProfile, seconds: float) -> float | None:
    """Samples per second if every worker takes a step in `seconds` seconds."""
    return config.workers * task.batch / seconds if seconds else None


def _unlike(config: RunConfig, site: Site) -> tuple[str, ...]:
    """A note if a run was simulated with another network or compute model than the cluster's."""
    if config.kind != "simulate":
        return ()
    compute = ComputeModel.parse(config.compute or "constant(0)")
    own = [
        text
        for text, alike in (
            (str(_network(config)), _network(config) == site.cluster.network(config.workers)),
            (str(compute), compute == site.compute(config.workers)),
        )
        if not alike
    ]
    if not own:
        return ()
    return (
        f"the run was simulated with {' and '.join(own)}: the error includes the difference from {site.cluster.name}",
    )


def _elsewhere(hosts: Hosts, cluster: ClusterShape) -> tuple[str, ...]:
    """A note if the workers of a run over several hosts share them otherwise than the cluster's machines."""
    if not hosts:
        return ()
    ran = [len(host) for host in hosts]
    there = [size for _, size in cluster.placed(sum(ran))]
    if ran == there:
        return ()
    said = f"the run had {ran} workers on its hosts, but {cluster.name} has {there} on its machines"
    return (f"{said}: the error includes this difference",)


def for_report(
    folders: Sequence[Path], cluster: ClusterShape | None = None, imports: Sequence[str] = ()
) -> list[Prediction | None]:
    """Return predictions of runs for a report: for `cluster` if it is given, otherwise from rehearsals of simulated
    runs.

    The entry of a run that cannot be predicted, or whose measurements are missing, is None. Without a cluster, only the
    record is read.

    Raises:
        NotAskedFor: a cluster is given, and a record needs a Python file that is not in `imports`.
    """
    return [_predicted(RunFolder(folder), cluster, imports) for folder in folders]


def _predicted(record: RunFolder, cluster: ClusterShape | None, imports: Sequence[str]) -> Prediction | None:
    try:
        found = _by_record(record) if cluster is None else check(record.path, cluster, imports)
    except NotAskedFor:
        raise
    except ConfigurationError:
        return None
    if found is None:
        return None
    source = f"{found.source}, {'; '.join((found.cluster, *found.notes))}"
    sent = found.predicted.sent_bytes, found.measured.sent_bytes
    return Prediction(found.predicted.seconds, found.measured.seconds, *sent, source)


def _by_record(record: RunFolder) -> Check | None:
    """The prediction of a simulated run without faults, if its strategy needs only sizes of the job; otherwise None."""
    config = record.read_config()
    if config.kind != "simulate" or config.faults or config.partition is not None:
        return None
    strategy = Strategy.parse(config.strategy)
    if strategy.traits.needs_job or config.workers > FEW:
        return None
    schema = record.read_result()[1]
    tensors = tuple(entry.shape for entry in schema.entries)
    task = JobProfile(config.job, schema.size, tensors, schema.dtype, int(config.batch or BATCH))
    measured = measure(record.read_events(), config.workers)
    predicted = _in_virtual_time(strategy, task, config)
    where = f"{config.network or 'ideal'}, {config.compute}"
    return Check(task.name, config.title, config.workers, where, "rehearsal", predicted, measured)


def measure(events: Sequence[Event], workers: int, where: str = "the record") -> Figures:
    """Return the mean figures of a run's steps, without the steps at the beginning that a rehearsal also ignores.

    Raises:
        ConfigurationError: a worker has fewer than three steps, or the steps take no time.
    """
    steps = steps_by_worker(events, workers, where)
    length = shortest(steps, where)
    counted = [one for mine in steps for one in mine[first_counted(length) :]]
    took = sum(one.compute_seconds + one.wait_seconds + one.comm_seconds for one in counted)
    seconds = took / len(counted)
    if not seconds > 0:
        raise ConfigurationError(
            f"steps in {where} must take more than 0 s to be compared with a prediction; simulate with gradients that "
            "take time"
        )
    late = [one.staleness for one in events if isinstance(one, UpdateEvent) and one.staleness is not None]
    samples = max((one.samples for one in events if isinstance(one, EvaluationEvent)), default=0)
    end = max(one.seconds for mine in steps for one in mine)
    return Figures(
        seconds,
        statistics.fmean(one.sent_bytes for one in counted),
        _busy(counted) / took,
        statistics.fmean(late) if late else None,
        samples / end if samples else None,
        usual_seconds(steps, length, ("compute_seconds",)),
    )


def _busy(steps: Sequence[StepEvent]) -> float:
    return sum(one.compute_seconds for one in steps)


def _network(config: RunConfig) -> Network:
    return Network.parse(config.network or "ideal")


def _rehearsed_steps(config: RunConfig) -> int | None:
    """Number of steps of the run if it is small; otherwise None, and the rehearsal determines the number."""
    return None if config.steps is None or config.steps > STEPS else max(2, int(config.steps))


def _in_virtual_time(strategy: Strategy, task: JobProfile, config: RunConfig) -> Figures:
    """The figures of a simulated run in which only gradients and messages take time."""
    at = Conditions(ComputeModel.parse(config.compute or "constant(0)"), _network(config), seed=config.seed)
    steps = None if config.steps is None else max(2, min(int(config.steps), EVERYONES // config.workers))
    found = rehearse(task, strategy, config.workers, at, steps=steps)
    rate = found.steps_per_second * found.batches * task.batch
    return Figures(found.seconds_per_step, found.sent_bytes_per_step, found.utilization, found.staleness, rate)


CHECK_COLUMNS = (
    TableColumn("strategy", text=True),
    TableColumn("workers", rank=3),
    TableColumn("step"),
    TableColumn("step measured"),
    TableColumn(
        "step error",
        note="step error: predicted time between two gradients of a worker, relative to the measured time.",
    ),
    TableColumn("samples/s", rank=1),
    TableColumn("samples/s measured", rank=1),
    TableColumn("samples/s error", rank=1),
    TableColumn("bytes", rank=2),
    TableColumn("bytes measured", rank=2),
    TableColumn("bytes error", rank=2, note="bytes: bytes that a worker sends per step."),
    TableColumn(
        "from",
        text=True,
        rank=4,
        note="from: a rehearsal, that is a short run in virtual time.",
    ),
)
"""Columns of the table of predictions and measurements."""


def check_table(found: Sequence[Check]) -> TextTable:
    """Return the table of predictions and measurements."""
    return TextTable(CHECK_COLUMNS, list(map(check_cells, found)), "predicted and measured")


def check_cells(one: Check) -> tuple[str, ...]:
    """Return the table row that compares the prediction of a run with its measurement."""
    return (
        short(one.strategy),
        str(one.workers),
        seconds(one.predicted.seconds),
        seconds(one.measured.seconds),
        _told_error(one.error),
        number(one.predicted.rate),
        number(one.measured.rate),
        _told_error(one.rate_error),
        size(one.predicted.sent_bytes),
        size(one.measured.sent_bytes),
        _told_error(one.sent_error),
        one.source,
    )


def _told_error(value: float | None) -> str:
    """Format a relative error with its sign in percent; an error that rounds to zero has no sign."""
    if value is None:
        return NONE
    return "0 %" if abs(value) < 0.0005 else f"{100 * value:+.1f} %"
