"""The summary of one run, computed from its events alone."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from flockstep.errors import ConfigurationError
from flockstep.messages import Address, node_name
from flockstep.partitions.base import Partition, Unsplit
from flockstep.records.config import DATA, SPLIT, ClockKind, RunConfig
from flockstep.records.curves import MetricCurve, curves
from flockstep.records.events import (
    DivergedEvent,
    EvaluationEvent,
    Event,
    LostEvent,
    NodeEvent,
    NoteEvent,
    RefusedEvent,
    ReplicaEvent,
    ResultEvent,
    ScalarEvent,
    SpanEvent,
    StepEvent,
    UpdateEvent,
)
from flockstep.strategies.base import Strategy

E = TypeVar("E", bound=Event)
Status = Literal["finished", "interrupted", "diverged", "failed"]
USELESS: tuple[Status, ...] = ("diverged", "failed")
"""Statuses of runs whose final model is not reliable."""
_IDENTITY = (
    "job", "strategy", "system", "workers", "seed", "network", "compute", "cluster", "clock", "lr",
)  # fmt: skip

_SECONDS = ("compute_seconds", "wait_seconds", "comm_seconds")
_COUNTS = ("sent_bytes", "received_bytes", "messages_sent", "messages_received")


class GradientWeight(msgspec.Struct, frozen=True):
    """Statistics of the factors on the learning rate with which servers applied one worker's gradients."""

    count: int
    """Number of applied gradients, counted at every server that applied them."""
    mean: float
    min: float
    max: float


class WorkerTotals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Totals of one worker over the run: from its node event or, if the worker died before it wrote one, the sum of
    its step events.
    """

    rank: int
    """Rank of the worker, from 0."""
    steps: int
    """Number of gradients that the worker used."""
    compute_seconds: float
    """Seconds from the request of a gradient until the worker had the gradient."""
    wait_seconds: float
    """Seconds in which the worker waited for messages; in virtual time, waiting for a message counts only until the
    message is sent.
    """
    comm_seconds: float
    """Seconds of sending, receiving, adding and optimizer steps; in virtual time, seconds in which the worker waited
    for messages in transit.
    """
    sent_bytes: int
    """Payload bytes of the messages that the worker sent."""
    received_bytes: int
    """Payload bytes of the messages that the worker received."""
    messages_sent: int
    """Number of messages that the worker sent."""
    messages_received: int
    """Number of messages that the worker received."""
    header_bytes: int
    """Bytes of message headers, which the payload bytes do not include."""
    completeness: float | None = None
    """Updates of other workers that took effect on this worker ÷ steps of the other workers; see
    `Summary.completeness`.
    """
    loss: float | None = None
    """Test loss of the worker's own replica when the worker ends; None if the replica was not evaluated or the loss is
    not finite.
    """
    metric: float | None = None
    """Metric of the worker's own replica when the worker ends; None if the replica was not evaluated or the metric is
    not finite.
    """
    gradient_weight: GradientWeight | None = None
    """Factors on the learning rate with which servers applied this worker's gradients (1/n under `bsp`, 1 under
    `asynchronous`): `count`, `mean`, `min` and `max`; None if the record has no weights.
    """

    refused: int = 0
    """Number of this worker's gradients that were refused because they were not finite or too large."""

    @property
    def seconds(self) -> float:
        """Seconds that the record accounts for: computing plus waiting plus communicating."""
        return self.compute_seconds + self.wait_seconds + self.comm_seconds

    @property
    def utilization(self) -> float | None:
        """Share of the accounted seconds in which the worker computed; None if no seconds are accounted for."""
        return self.compute_seconds / self.seconds if self.seconds > 0 else None


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of one run. Seconds are measured by `clock`; bytes are payload bytes.

    "per worker" means the mean over all workers.
    """

    job: str
    strategy: str
    system: str | None = None
    """Name by which the strategy was given: a system, or an alias such as `asgd`; None for an expression."""
    workers: int
    seed: int
    network: str | None
    compute: str | None
    cluster: str | None = None
    """Name of the cluster from which network and compute model were derived; None if the user gave network and compute
    model.
    """
    clock: ClockKind
    """Kind of the seconds in the record: `real` if they were measured, `virtual` if they were modeled."""
    metric: str | None
    """Name of the metric that measures the run's quality: the job's, or of a script the one that --target names,
    otherwise the first that the script recorded; None if the script recorded none.
    """
    higher_is_better: bool
    target: float | None
    lr: float | None = None
    """Learning rate at the start of the run, before a schedule changes it."""
    status: Status
    """Status of the run; `diverged` if the training loss, the loss or metric of the last evaluation, or the parameters
    of a script's worker are not finite.
    """
    error: str | None
    """Reason why the run did not finish, or why its final model is not reliable."""
    seconds: float
    """Seconds from the start of the run to its last event."""
    seconds_to_target: float | None
    """Seconds from the start of the run to the first evaluation whose metric reaches the target; None if no evaluation
    does, or there is no target.
    """
    seconds_to_target_range: tuple[float, float] | None = None
    """Times, in seconds, of the last evaluation before the target was reached (or 0) and of the evaluation that reached
    it; for medians over seeds, the shortest and the longest time to the target. None if the target was not reached.
    """
    samples_to_target: int | None
    """Samples used by all workers together up to the evaluation that reaches the target; None also for scripts."""
    bytes_to_target: float | None
    """Bytes sent per worker up to the evaluation that reaches the target."""
    final_metric: float | None
    """Metric of the last evaluation; None if there is no evaluation or the metric is not finite."""
    best_metric: float | None
    """Best finite metric of all evaluations."""
    metrics: dict[str, float | None] = {}
    """Name of each metric of the run → its last value; None if that is not finite."""
    final_loss: float | None
    """Test loss of the last evaluation; None if there is no evaluation or the loss is not finite."""
    samples: int
    """Samples used by all workers together up to the last evaluation."""
    sent_bytes_per_worker: float
    received_bytes_per_worker: float
    messages_per_worker: float
    """Number of messages sent plus messages received, mean over the workers."""
    header_bytes_per_worker: float
    """Bytes of message headers, which the payload bytes do not include, mean over the workers."""
    staleness_mean: float | None
    """Mean staleness of all updates whose staleness is recorded; an event of `count` updates counts `count` times."""
    staleness_max: int | None
    staleness_counts: dict[int, int]
    """Staleness → number of updates."""
    utilization: float | None
    """Mean over the workers of seconds computing ÷ (seconds computing + waiting + communicating)."""
    divergence: float | None
    """Root mean square distance of the replicas from their mean at the last evaluation. If that is unknown: 0 if all
    workers ended with equal parameters, otherwise None.
    """
    completeness: float | None
    """Communication completeness: the share of updates that took effect on other nodes.

    Where servers record updates: updates applied by servers ÷ steps of all workers ÷ number of servers, equal for all
    workers. Otherwise, where workers record updates: updates of other workers that took effect ÷ steps of other
    workers, both summed over the workers. None if the record has no updates, if no other worker made a step, or if the
    number of workers changed during the run, because steps are counted anew then. The value is never clipped: a value
    above 1 shows an error in the strategy's accounting.
    """
    effective_rate: float | None = None
    """Sum of the weights of all gradients ÷ number of servers ÷ mean steps per worker: the factor on the learning rate
    with which one gradient of each worker was applied in total; 1 under `bsp`, n under `asynchronous`, less if
    gradients were dropped. None if the record has no weights, or if the number of workers changed during the run.
    """
    replicas_agree: bool | None
    """Whether all workers ended with equal parameters; None if a worker recorded no hash."""
    hashes: dict[str, str]
    """Node ("worker 0", "server 0", …) → hash of its final parameters."""
    per_worker: list[WorkerTotals]
    """Totals of each worker, in order of rank."""
    lost: list[LostEvent]
    """The first report on each node that died or stopped responding."""
    result_step: float | None = None
    """Mean number of local steps of the workers whose model is in result.npy; `result_seconds` is the time of that
    model.
    """
    result_seconds: float | None = None
    notes: list[str] = []
    """Sentences that say which parts the record lacks, and why."""
    scalars: dict[str, float] = {}
    """Scalars recorded by the strategy, by name: the last value of each node, summed over the nodes where it is finite.
    `rejected_connections`, if there are any, counts the connections that the nodes refused, and `device_bytes` the
    bytes of arrays that processes of a real run copied between the host and a device such as a GPU.
    """

    @property
    def refusals(self) -> list[str]:
        """One sentence for each worker whose gradients were refused, with the number of refused gradients."""
        return [
            f"{node_name(each.rank)}: {each.refused} bad gradient{'s' if each.refused > 1 else ''} refused; zeros "
            "were used instead"
            for each in self.per_worker
            if each.refused
        ]

    @property
    def useful(self) -> bool:
        """Whether the final model of the run is reliable."""
        return self.status not in USELESS

    @property
    def bytes_per_worker(self) -> float:
        """Payload bytes sent plus payload bytes received, mean over the workers."""
        return self.sent_bytes_per_worker + self.received_bytes_per_worker

    @property
    def steps(self) -> int:
        """Number of local steps of all workers together."""
        return sum(worker.steps for worker in self.per_worker)


def time_of(event: Event) -> float:
    """Return the time at which the activity that an event describes was complete, in seconds."""
    return event.end if isinstance(event, SpanEvent) else event.seconds


LACKS = "the record lacks"
"""First words of the note of a summary about events that were lost."""


def partition_notes(config: RunConfig) -> list[str]:
    """Return sentences about what differs from the run without the partition of `config`, and about its data."""
    said = [] if config.partition is None else Partition.parse(config.partition).notes
    return [*said, *(config.versions[key] for key in (SPLIT, DATA) if key in config.versions)]


def summarize(
    config: RunConfig, events: Sequence[Event], status: Status, error: str | None = None, notes: Sequence[str] = ()
) -> Summary:
    """Summarize the events of a run, which may be in any order; every figure is computed from them alone.

    A `status` of "finished" becomes "diverged" if the final model is not finite. `error` is the reason why the run did
    not finish; `notes` are further sentences for the summary's notes.
    """
    ordered = sorted(events, key=time_of)
    metrics = [curve for curve in curves(config, ordered) if not curve.is_loss]
    measured = measure(config, metrics)
    ends = {curve.name: _finite(curve.points[-1].value) for curve in metrics}
    last = _last(ordered, EvaluationEvent)
    if status == "finished":
        if ends.get(measured["metric"], 0.0) is None or (last is not None and not math.isfinite(last.loss)):
            status = "diverged"
            error = "the loss or metric of the last evaluation is not finite; lower the learning rate"
        elif (diverged := next((event for event in ordered if isinstance(event, DivergedEvent)), None)) is not None:
            status, error = "diverged", diverged.reason
    partition: Partition = Unsplit() if config.partition is None else Partition.parse(config.partition)
    parts = partition.parts * config.processes_of_replica
    if parts > config.workers:
        raise ConfigurationError(
            f"partition = {config.partition} splits a replica over {parts} workers, but the run had {config.workers}; "
            "correct config.toml, or repeat the run"
        )
    nodes = {event.node: event for event in ordered if isinstance(event, NodeEvent)}
    hashes = {node_name(a): nodes[a].hash for a in sorted(nodes, key=lambda a: (a < 0, abs(a)))}
    agree = None
    if all(rank in nodes for rank in range(config.workers)):  # the workers that hold the same part of the model
        same = (range(part, config.workers, parts) for part in range(parts))
        agree = all(len({nodes[rank].hash for rank in ranks}) == 1 for ranks in same)
    updates = [event for event in ordered if isinstance(event, UpdateEvent)]
    workers = _totals(config.workers, nodes, ordered)
    workers, accounts = _accounted(workers, updates, nodes, parts, _resized(ordered))
    scalars: dict[str, float] = {}
    for (name, _), value in {(e.name, e.node): e.value for e in ordered if isinstance(e, ScalarEvent)}.items():
        if math.isfinite(value):
            scalars[name] = scalars.get(name, 0) + value
    staleness: Counter[int] = Counter()
    for update in updates:
        if update.staleness is not None and (count := _count(update, config.workers // parts)) > 0:
            staleness[update.staleness] += count
    result, divergence = _last(ordered, ResultEvent), None if last is None else last.divergence
    said = [event.text for event in ordered if isinstance(event, NoteEvent)]
    first = {event.node: event for event in reversed(ordered) if isinstance(event, LostEvent)}
    summary = Summary(
        **{name: getattr(config, name) for name in _IDENTITY},
        **measured,
        **accounts,
        status=status,
        error=error,
        result_step=None if result is None else result.step,
        result_seconds=None if result is None else result.seconds,
        seconds=time_of(ordered[-1]) if ordered else 0.0,
        metrics=ends,
        final_loss=None if last is None else _finite(last.loss),
        samples=0 if last is None else last.samples,
        sent_bytes_per_worker=_mean(w.sent_bytes for w in workers) or 0.0,
        received_bytes_per_worker=_mean(w.received_bytes for w in workers) or 0.0,
        messages_per_worker=_mean(w.messages_sent + w.messages_received for w in workers) or 0.0,
        header_bytes_per_worker=_mean(w.header_bytes for w in workers) or 0.0,
        staleness_mean=sum(k * n for k, n in staleness.items()) / staleness.total() if staleness else None,
        staleness_max=max(staleness, default=None),
        staleness_counts=dict(sorted(staleness.items())),
        utilization=_mean(w.utilization for w in workers if w.utilization is not None),
        divergence=0.0 if divergence is None and agree else divergence,
        replicas_agree=agree,
        hashes=hashes,
        per_worker=workers,
        scalars=scalars,
        lost=sorted(first.values(), key=ordered.index),
    )
    apart = filter(None, [trained_apart(summary)])
    return msgspec.structs.replace(summary, notes=[*said, *notes, *apart, *partition_notes(config)])


def trained_apart(summary: Summary) -> str | None:
    """Return a sentence if workers exchanged nothing, or ended apart although they must be equal; otherwise None."""
    workers, strategy = summary.per_worker, summary.strategy
    # With equal parameters, one worker is left, or all write to one array.
    if len(workers) < 2 or summary.replicas_agree is not False:
        return None
    found: Strategy | None = None
    with contextlib.suppress(ConfigurationError):  # a custom strategy that this process has not imported
        found = Strategy.parse(strategy)
    # Bytes of arrays, not messages: workers that never exchanged still tell each other that they have finished.
    silent = [one for one in workers if one.steps and not one.sent_bytes + one.received_bytes]
    if not silent and found is not None and found.traits.alike:
        return (
            f"The workers ended with different parameters, although {found} keeps the parameters of all workers equal: "
            "a script has changed parameters or settings of its optimizer on some workers only, or the workers' "
            "processors round differently; let all ranks make the same changes."
        )
    if not silent:
        return None
    steps = max(one.steps for one in silent)
    taken = f"{steps} step{'s' * (steps > 1)}"
    if len(silent) == len(workers):
        sends = None if found is None else found.expected_sends(len(workers), steps)  # of strategies that draw them
        expected = "" if sends is None else f", where {strategy} is expected to send {sends:.3g} times"
        return (
            f"No worker sent or received parameters in {taken}{expected}: each worker trained by itself, so the result "
            "is not that of the strategy; train longer (--epochs, --steps), or let the strategy exchange more often."
        )
    ranks = ", ".join(str(one.rank) for one in silent)
    return (
        f"Worker{'s' * (len(silent) > 1)} {ranks} sent and received no parameters in {taken}, and therefore trained "
        "independently of the other workers; train longer (--epochs, --steps), or let the strategy exchange more often."
    )


def measure(config: RunConfig, metrics: Sequence[MetricCurve]) -> dict[str, Any]:
    """Return the fields of a summary that say how good the model is, and when it reached the target.

    The run is measured by the one of its `metrics` that the configuration names, otherwise by the first.
    """
    curve = next((curve for curve in metrics if config.metric in (None, curve.name)), None)
    if curve is None:
        curve = MetricCurve(config.metric or "", config.higher_is_better, ())
    target = config.target
    higher, points = curve.higher_is_better, curve.points
    hit = curve.first_reaching(target)
    before = max((point.seconds for point in points if hit is not None and point.seconds < hit.seconds), default=0.0)
    return {
        "metric": curve.name or None,
        "higher_is_better": higher,
        "target": target,
        "seconds_to_target": hit.seconds if hit else None,
        "seconds_to_target_range": (before, hit.seconds) if hit else None,
        "samples_to_target": hit.samples if hit else None,
        "bytes_to_target": hit.sent_bytes if hit else None,
        "final_metric": _finite(points[-1].value) if points else None,
        "best_metric": (max if higher else min)(curve.finite, default=None),
    }


def reaches(config: RunConfig, metric: float) -> bool:
    """Return whether a metric reaches the target of the run; False if the run has no target."""
    if config.target is None:
        return False
    return metric >= config.target if config.higher_is_better else metric <= config.target


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: Iterable[float]) -> float | None:
    found = [*values]
    return math.fsum(found) / len(found) if found else None


def _last(events: Sequence[Event], kind: type[E]) -> E | None:
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def _totals(workers: int, nodes: Mapping[Address, NodeEvent], events: Sequence[Event]) -> list[WorkerTotals]:
    """The totals of each worker, from its node event or, if it died before, from its steps."""
    steps: dict[int, list[StepEvent]] = {rank: [] for rank in range(workers)}
    for event in events:
        if isinstance(event, StepEvent) and event.rank in steps:
            steps[event.rank].append(event)
    replicas = {event.rank: event for event in events if isinstance(event, ReplicaEvent)}
    refused = Counter(event.source for event in events if isinstance(event, RefusedEvent))
    found = []
    for rank, taken in steps.items():
        totals: dict[str, Any]
        if (node := nodes.get(rank)) is not None:
            totals = {name: getattr(node, name) for name in ("steps", *_SECONDS, *_COUNTS, "header_bytes")}
        else:
            totals = {name: math.fsum(getattr(step, name) for step in taken) for name in _SECONDS}
            totals |= {name: sum(getattr(step, name) for step in taken) for name in _COUNTS}
            totals |= {"steps": max((step.step for step in taken), default=0), "header_bytes": 0}
        if (own := replicas.get(rank)) is not None:
            totals |= {"loss": _finite(own.loss), "metric": _finite(own.metric)}
        found.append(WorkerTotals(rank=rank, refused=refused[rank], **totals))
    return found


def _resized(events: Sequence[Event]) -> bool:
    """Whether the number of workers changed; from then on they count steps as if there had never been others."""
    taken: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, StepEvent):
            taken.setdefault(event.rank, []).append(event.step)
    return any(len(steps) != max(steps) for steps in taken.values())


def _accounted(
    workers: list[WorkerTotals],
    updates: Sequence[UpdateEvent],
    nodes: Mapping[Address, NodeEvent],
    parts: int,
    resized: bool,
) -> tuple[list[WorkerTotals], dict[str, Any]]:
    """The workers with their communication completeness and the weights of their gradients, and both figures of the
    run, which are unknown if the run was `resized`.

    Updates go to the workers that hold the same of the `parts` parts of the model.
    """
    total, group = sum(worker.steps for worker in workers) // parts, len(workers) // parts
    shares: list[float | None] = [None] * len(workers)
    completeness = None
    if servers := {update.node for update in updates if update.node < 0}:
        servers |= {node for node, event in nodes.items() if node < 0 and event.backup_of is None}
        applied = sum(_count(update, group) for update in updates if update.node < 0)
        if total and not resized:
            completeness = applied / (len(servers) * total)
            shares = [completeness] * len(workers)
    elif updates and not resized:
        arrived: Counter[int] = Counter()
        for update in updates:
            if update.source != update.node:
                arrived[update.node] += _count(update, group)
        others = [total - worker.steps for worker in workers]
        shares = [arrived[w.rank] / of if of else None for w, of in zip(workers, others, strict=True)]
        completeness = arrived.total() / sum(others) if sum(others) else None
    weights: dict[int, list[tuple[float, int]]] = {worker.rank: [] for worker in workers}
    weighed = [update for update in updates if update.weight is not None and update.source in weights]
    for update in weighed:
        weights[update.source].append((update.weight, update.count))  # type: ignore[index,arg-type]
    rate, steps = None, sum(worker.steps for worker in workers)
    if weighed and steps and not resized:
        whole = math.fsum(weight * count for own in weights.values() for weight, count in own)
        rate = whole / len({update.node for update in weighed}) / (steps / len(workers))
    accounted = [
        msgspec.structs.replace(worker, completeness=share, gradient_weight=_spread(weights[worker.rank]))
        for worker, share in zip(workers, shares, strict=True)
    ]
    return accounted, {"completeness": completeness, "effective_rate": rate}


def _spread(weights: Sequence[tuple[float, int]]) -> GradientWeight | None:
    """Count, mean, minimum and maximum of weights, given as pairs (weight, number of gradients)."""
    count = sum(times for _, times in weights)
    if not count:
        return None
    mean = math.fsum(weight * times for weight, times in weights) / count
    each = [weight for weight, _ in weights]
    return GradientWeight(count, mean, min(each), max(each))


def _count(update: UpdateEvent, workers: int) -> int:
    """Number of updates of an event; one without a source stands for all workers but its node."""
    return update.count if update.source is not None else update.count * (workers - (update.node >= 0))
