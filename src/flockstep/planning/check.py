"""Compares the prediction of a plan with the measurements of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from flockstep.costs.cluster import ClusterShape
from flockstep.errors import ConfigurationError
from flockstep.frameworks.job import import_components
from flockstep.nodes import Hosts
from flockstep.planning.fit import first_counted, hosts_in, usual_seconds
from flockstep.planning.job_profile import BATCH, JobProfile, Site, task_of
from flockstep.planning.record_imports import NotAskedFor, trusted
from flockstep.planning.recorded import shortest, steps_by_worker
from flockstep.planning.rehearsal import STEPS, Conditions, rehearse
from flockstep.planning.step_prediction import StepPrediction, predict_step
from flockstep.planning.words import short
from flockstep.records.config import RunConfig
from flockstep.records.events import EvaluationEvent, Event, UpdateEvent
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
COORDINATOR = 0
"""Index of the host that is assumed to coordinate a run: the one with the lowest ranks, node rank 0."""


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

    source: ClassVar[str] = "rehearsal"
    """Text that says how the prediction was obtained."""
    job: str
    strategy: str
    workers: int
    cluster: str
    """Name of the cluster, or of the simulated network, on which the prediction is based."""
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
        """Relative error of the predicted samples per second; None if a value is unknown."""
        return self.predicted.rate / self.measured.rate - 1 if self.predicted.rate and self.measured.rate else None

    def document(self) -> dict[str, Any]:
        """Return the comparison as plain data, for JSON."""
        names = "job strategy workers cluster source error sent_error rate_error notes error_besides_gradients"
        rows = {name: vars(getattr(self, name)) for name in ("predicted", "measured")}
        return {**{name: getattr(self, name) for name in names.split()}, **rows}

    def cells(self) -> tuple[str, ...]:
        """Return the table row that compares prediction and measurement."""
        predicted, measured = self.predicted, self.measured
        pairs = (
            (seconds(predicted.seconds), seconds(measured.seconds), self.error),
            (number(predicted.rate), number(measured.rate), self.rate_error),
            (size(predicted.sent_bytes), size(measured.sent_bytes), self.sent_error),
        )
        told = [text for one, other, error in pairs for text in (one, other, _told_error(error))]
        return (short(self.strategy), str(self.workers), *told, self.source)


CHECK_COLUMNS = (
    TableColumn("strategy", text=True),
    TableColumn("workers", rank=3),
    TableColumn("step"),
    TableColumn("step measured"),
    TableColumn(
        "step error",
        note="step error: predicted time between two gradients of a worker, relative to the measured time.",
    ),
    *(TableColumn(f"samples/s{what}", rank=1) for what in ("", " measured", " error")),
    *(TableColumn(f"bytes{what}", rank=2) for what in ("", " measured")),
    TableColumn("bytes error", rank=2, note="bytes: bytes that a worker sends per step."),
    TableColumn("from", text=True, rank=4, note="from: a rehearsal, that is a short run in virtual time."),
)
"""Columns of the table of predictions and measurements."""


def check_table(found: Sequence[Check]) -> TextTable:
    """Return the table of predictions and measurements."""
    return TextTable(CHECK_COLUMNS, [one.cells() for one in found], "predicted and measured")


def _told_error(value: float | None) -> str:
    """Format a relative error with its sign in percent; an error that rounds to zero has no sign."""
    if value is None:
        return NONE
    return "0 %" if abs(value) < 0.0005 else f"{100 * value:+.1f} %"


def check(folder: Path | str, cluster: ClusterShape | None = None, imports: Sequence[str] = ()) -> Check:
    """Predict the run whose record is in `folder`, and compare the prediction with the record.

    Args:
        folder: folder of the record.
        cluster: the machines of the run; a simulated run is otherwise predicted for its own network and compute model.
        imports: the Python files that the record may need, including its job's file; no other file is executed.

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
    task = task_of(config.job, batch, load_job(config.job, config.seed, config))
    if cluster is None:
        return _of_simulated_run(config, strategy, task, measured)
    site = Site(task, cluster)
    law = site.compute(config.workers)
    # A rehearsal takes as many steps as the run if these are few, and otherwise as many as it needs.
    steps = None if config.steps is None or config.steps > STEPS else max(2, int(config.steps))
    found = predict_step(strategy, site, config.workers, steps=steps)
    added, evaluations = evaluation_seconds(found, config, hosts, task.nbytes, cluster)
    took = found.seconds + added
    predicted = Figures(
        took,
        found.sent_bytes,
        found.utilization * found.seconds / took if added else found.utilization,
        found.staleness,
        config.workers * task.batch / took if took else None,
        0.0 if isinstance(law, SharedCores) else mean_of(law),  # on shared cores, workers also wait for a core
    )
    notes, own = [*_unlike(config, site, law), *_elsewhere(hosts, cluster), *evaluations], None
    ratio = measured.gradient / predicted.gradient if measured.gradient and predicted.gradient else 1.0
    if max(ratio, 1 / ratio) > APART:
        groups = tuple(replace(group, speed=group.speed / ratio) for group in cluster.groups)
        slowed = replace(site, cluster=replace(cluster, groups=groups))
        there = predict_step(strategy, slowed, config.workers, steps=steps)
        own = there.seconds + evaluation_seconds(there, config, hosts, task.nbytes, cluster)[0]
        notes.append(
            f"a gradient of {config.title} took {seconds(measured.gradient)} in the run and takes "
            f"{seconds(predicted.gradient)} on {cluster.name}: with the gradients of the run a step is predicted to "
            f"take {seconds(own)}, an error of {_told_error(own / measured.seconds - 1)}"
        )
    return Check(task.name, config.title, config.workers, cluster.name, predicted, measured, own, tuple(notes))


def _of_simulated_run(config: RunConfig, strategy: Strategy, task: JobProfile, measured: Figures) -> Check:
    """A run in which only gradients and messages take virtual time, beside a rehearsal with the run's own draws."""
    network = config.network or "ideal"
    at = Conditions(ComputeModel.parse(config.compute or "constant(0)"), Network.parse(network), seed=config.seed)
    steps = None if config.steps is None else max(2, min(int(config.steps), EVERYONES // config.workers))
    found = rehearse(task, strategy, config.workers, at, steps=steps)
    rate = found.steps_per_second * found.batches * task.batch
    predicted = Figures(found.seconds_per_step, found.sent_bytes_per_step, found.utilization, found.staleness, rate)
    return Check(task.name, config.title, config.workers, f"{network}, {config.compute}", predicted, measured)


def _unlike(config: RunConfig, site: Site, law: ComputeModel) -> list[str]:
    """A note if a run was simulated with another network or compute model than the cluster's."""
    if config.kind != "simulate":
        return []
    network, compute = Network.parse(config.network or "ideal"), ComputeModel.parse(config.compute or "constant(0)")
    there = (network, site.cluster.network(config.workers)), (compute, law)
    own = [str(one) for one, other in there if one != other]
    where = f"the error includes the difference from {site.cluster.name}"
    return [f"the run was simulated with {' and '.join(own)}: {where}"] if own else []


def _elsewhere(hosts: Hosts, cluster: ClusterShape) -> list[str]:
    """A note if the workers of a run over several hosts share them otherwise than the cluster's machines."""
    ran = [len(host) for host in hosts]
    there = [size for _, size in cluster.placed(sum(ran))] if hosts else []
    if ran == there:
        return []
    said = f"the run had {ran} workers on its hosts, but {cluster.name} has {there} on its machines"
    return [f"{said}: the error includes this difference"]


def evaluation_seconds(
    found: StepPrediction, config: RunConfig, hosts: Hosts, nbytes: float, cluster: ClusterShape
) -> tuple[float, tuple[str, ...]]:
    """Return the seconds by which a predicted step becomes longer because workers send models of `nbytes` bytes for
    evaluation, and a note about them; 0 and no note if no model crosses a link: on one host, in virtual time, if the
    run evaluates only before the first and after the last step, or if `hosts` are not those of the run's workers.

    At every tick of a run over several hosts, that is every `evaluate_every` steps, each worker sends its parameters,
    unencoded, to the coordinator, over one connection for each host, in the background. The card of the coordinator's
    host is the bottleneck, because each other host sends only its own share. With several workers per host the card
    carries more messages than those of one worker, which are counted here, so that the result is then a lower bound.

    Let workers wait m seconds of a step for bytes on the link, and the link be free for c seconds. While models of h
    hosts arrive, TCP gives a message to the coordinator's host one share of 1 + h, so that a step takes c + (1 + h) m.
    In this step the models advance by c + h m: what passes while workers compute delays no step. E seconds of models
    per step thus make a step E h m / (c + h m) longer. A step cannot be shorter than the time that the link needs for
    both: models that workers send faster than the link carries them make workers wait for acknowledgements.
    """
    every, steps, others = config.evaluate_every, config.steps, len(hosts) - 1
    if config.kind == "simulate" or others < 1 or sum(map(len, hosts)) != config.workers:
        return 0.0, ()
    if not every or (steps is not None and every >= steps):
        return 0.0, ()
    first = hosts[COORDINATOR][0]
    bandwidths = [
        cluster.wire_between(first, rank, config.workers).bandwidth
        for place, host in enumerate(hosts)
        if place != COORDINATOR
        for rank in host
    ]
    models = sum(nbytes / bandwidth for bandwidth in bandwidths) / every
    served = found.server_bytes / 2 * others / (1 + others)  # half enter the card; a worker beside a server uses none
    busy = max(found.sent_bytes, served) / min(bandwidths)
    waited = min(busy, (1 - found.utilization) * found.seconds)
    shared = models * others * waited / (found.seconds - waited + others * waited) if waited > 0 else 0.0
    longer = max(shared, busy + models - found.seconds, 0.0) if found.seconds > 0 else 0.0
    note = (
        f"workers send {size(nbytes * len(bandwidths))} to the coordinator's host every {every:g} steps for "
        f"evaluation: with these models a step is predicted to take {seconds(found.seconds + longer)}, without them "
        f"{seconds(found.seconds)}"
    )
    return longer, (note,)


def for_report(
    folders: Sequence[Path], cluster: ClusterShape | None = None, imports: Sequence[str] = ()
) -> list[Prediction | None]:
    """Return predictions of runs for a report: for `cluster` if it is given, otherwise from rehearsals of simulated
    runs, for which only the record is read.

    The entry of a run that cannot be predicted, or whose measurements are missing, is None.

    Raises:
        NotAskedFor: a cluster is given, and a record needs a Python file that is not in `imports`.
    """
    told: list[Prediction | None] = []
    for folder in folders:
        try:
            found = _by_record(RunFolder(folder)) if cluster is None else check(folder, cluster, imports)
        except NotAskedFor:
            raise
        except ConfigurationError:
            found = None
        if found is None:
            told.append(None)
            continue
        sent = found.predicted.sent_bytes, found.measured.sent_bytes
        source = f"{found.source}, {'; '.join((found.cluster, *found.notes))}"
        told.append(Prediction(found.predicted.seconds, found.measured.seconds, *sent, source))
    return told


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
    return _of_simulated_run(config, strategy, task, measure(record.read_events(), config.workers))


def measure(events: Sequence[Event], workers: int, where: str = "the record") -> Figures:
    """Return the mean figures of a run's steps, without the steps at the beginning that a rehearsal also ignores.

    Raises:
        ConfigurationError: a worker has fewer than three steps, or the steps take no time.
    """
    steps = steps_by_worker(events, workers, where)
    length = shortest(steps, where)
    counted = [one for mine in steps for one in mine[first_counted(length) :]]
    took = sum(one.compute_seconds + one.wait_seconds + one.comm_seconds for one in counted)
    mean = took / len(counted)
    if not mean > 0:
        raise ConfigurationError(
            f"steps in {where} must take more than 0 s to be compared with a prediction; simulate with gradients that "
            "take time"
        )
    late = [one.staleness for one in events if isinstance(one, UpdateEvent) and one.staleness is not None]
    samples = max((one.samples for one in events if isinstance(one, EvaluationEvent)), default=0)
    end = max(one.seconds for mine in steps for one in mine)
    return Figures(
        mean,
        statistics.fmean(one.sent_bytes for one in counted),
        sum(one.compute_seconds for one in counted) / took,
        statistics.fmean(late) if late else None,
        samples / end if samples else None,
        usual_seconds(steps, length, ("compute_seconds",)),
    )
