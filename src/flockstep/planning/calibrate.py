"""Measures the gradients and messages of this machine, and describes the machine as a cluster."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_file import to_toml
from flockstep.costs.machines import ClusterLink, MachineGroup, Rates
from flockstep.errors import ConfigurationError
from flockstep.launchers.threads import limit_threads
from flockstep.launchers.train import train
from flockstep.options import MeasureOptions
from flockstep.planning.fit_durations import fit_law
from flockstep.planning.job_profile import identity, task_of
from flockstep.planning.rates import CODECS, measure_operations, measure_rates
from flockstep.planning.words import many
from flockstep.records.config import RunConfig
from flockstep.records.events import Event, ScalarEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.report import formatting
from flockstep.report.progress import ProgressCallback, silent
from flockstep.simulation.law import mean_of
from flockstep.system import cores

GRADIENTS = 30
"""Number of gradients that each worker computes alone, and again while all workers compute."""
ROUNDS = 20
NEAR = 0.15
"""Largest relative difference between the measured slowdown and the slowdown of a whole number of cores for which the
calibration adds no note.
"""
UNEQUAL = 2.0
"""Ratio between the largest and the smallest measured value of different pairs of workers above which a note says that
the pairs differ.
"""


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: the description of a cluster, with notes about the measurement."""

    shape: ClusterShape
    notes: tuple[str, ...]

    def to_toml(self) -> str:
        """Return the cluster's description as text in TOML format, with the notes as comments at the top."""
        return to_toml(self.shape, self.notes)


def calibrate(options: MeasureOptions, say: ProgressCallback = silent) -> Calibration:
    """Measure this machine: the durations of the job's gradients in one process and in several processes at once, of
    messages, of codecs and of optimizers. `say` is called with lines of progress.

    Returns:
        The description of a cluster of one machine, with notes about the measurement.

    Raises:
        ConfigurationError: a job, transport or codec does not exist, counts are too small, or no bandwidth can be
            measured.
    """
    job, workers, gradients, rounds = options.job, options.workers, options.gradients, options.rounds
    if gradients < 3 or rounds < 1:
        raise ConfigurationError(
            f"a calibration needs >= 3 gradients and >= 1 round, got {gradients} and {rounds}; {GRADIENTS} and "
            f"{ROUNDS} are usual"
        )
    probe = Path(__file__).with_name("probe.py")
    config = RunConfig(
        kind="train",
        job=job,
        strategy=f"flockstep_probe(rounds={rounds})",
        workers=workers,
        transport=options.transport,
        threads=options.threads,
        steps=2 * gradients,
        evaluate_every=float(2 * gradients),
        imports=(str(probe),),
    )
    say(f"gradients of {job} and messages on {many(workers, 'process', 'processes')}")
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
        events = RunFolder(Path(folder) / "run").read_events()
    say("codecs and optimizers")
    limit_threads(options.threads)
    rates = measure_rates(options.codec or CODECS)
    machine = _Machine(rates, measure_operations(), task_of(job).work, cores() // options.threads)
    return _described(events, job, workers, options.transport, gradients, machine)


@dataclass(frozen=True)
class _Machine:
    """Rates of one worker, and the operations of the job's gradient; None if unknown."""

    rates: Rates
    operations: float
    work: float | None
    cores: int
    """Number of workers that have a core for each of their threads."""


def _described(
    events: Sequence[Event], job: str, workers: int, transport: str, gradients: int, machine: _Machine
) -> Calibration:
    alone = _computed(events, 2, gradients)
    together = _computed(events, gradients + 2, 2 * gradients)
    count = many(workers, "process", "processes")
    notes = [f"measured by flockstep calibrate: {count} of {job} over {transport} on one machine"]
    cores, times = _sharing(alone, together, workers, notes)
    if cores == workers:  # no worker waited for a core: there may be more cores
        cores = max(cores, machine.cores)
    fit = fit_law(times)
    notes.append(fit.why)
    wires, message, copy = [], 0.0, 0.0
    if workers > 1:
        message = _message(events)
        copy = _copy(events, message)
        wires.append(_wire(_figures(events), message, notes))
        notes.append(
            "links were measured one pair of workers at a time: the slowdown of simultaneous messages is not included"
        )
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    group = MachineGroup("here", 1, workers, cores=cores, memory=memory)
    overhead = 0.0
    if machine.work is not None:
        overhead = max(0.0, mean_of(fit.law) - machine.work / machine.operations)
    notes.append(
        "operations per second are measured on a matrix product, and overhead is the remaining time of this job's "
        "gradient: a rough estimate for other jobs"
    )
    notes.append("the rate of failures is not measured")
    shape = ClusterShape(
        "here",
        (group,),
        tuple(wires),
        fit.law,
        machine.operations,
        float(f"{overhead:.3g}"),
        f"{job} on this machine",
        identity(job),
        machine.rates,
        message,
        copy,
        _besides(events, 2, gradients),
        servers_apart=group.count > 1,  # in namespaces each server has one of its own
    )
    return Calibration(shape, tuple(notes))


def _computed(events: Sequence[Event], first: int, last: int) -> list[float]:
    """Seconds of the gradients number `first` to `last` of all workers."""
    return [
        one.compute_seconds
        for one in events
        if isinstance(one, StepEvent) and first <= one.step <= last and one.compute_seconds > 0
    ]


def _sharing(alone: list[float], together: list[float], workers: int, notes: list[str]) -> tuple[int, list[float]]:
    """Number of cores of the workers, and the matching durations of gradients.

    n workers on c cores take n/c times as long as one alone; c is the number whose slowdown is nearest to the measured
    one. If the measured slowdown differs (memory, caches), durations are scaled to match the gradients computed all at
    once.
    """
    if workers == 1:
        return 1, together
    slowdown = statistics.fmean(together) / statistics.fmean(alone)  # a few gradients wait for a core, most do not
    notes.append(
        f"with all {workers} workers at once, a gradient takes on average {slowdown:.2f} times as long as with "
        "one worker alone"
    )
    cores = min(range(1, workers + 1), key=lambda c: abs(math.log(slowdown * c / workers)))
    if cores == workers:
        return cores, together
    scale = slowdown * cores / workers
    if abs(scale - 1) > NEAR:
        notes.append(
            f"no whole number of cores explains this slowdown: durations are assumed to be {scale:.2f} times "
            "those of one worker alone"
        )
    return cores, [scale * one for one in alone]


def _figures(events: Sequence[Event]) -> dict[tuple[str, str], dict[int, float]]:
    """Pair of workers → message size in bytes → seconds one way."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for event in events:
        if isinstance(event, ScalarEvent) and event.name.startswith("one way "):
            first, second, nbytes = event.name.split()[2:]
            found.setdefault((first, second), {})[int(nbytes)] = event.value
    return found


def _message(events: Sequence[Event]) -> float:
    """Seconds that a node spends on a message; 0 if not measured."""
    found = [event.value for event in events if isinstance(event, ScalarEvent) and event.name.startswith("message ")]
    return float(f"{statistics.median(found):.4g}") if found else 0.0


def _copy(events: Sequence[Event], message: float) -> float:
    """Seconds that a core spends on a byte at either end of a link, without the handling of its message; 0 if not
    measured.
    """
    found: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event, ScalarEvent) and event.name.startswith("copy "):
            found.setdefault(int(event.name.split()[2]), []).append(event.value)
    if not found:
        return 0.0
    nbytes = max(found)
    return float(f"{max(0.0, statistics.median(found[nbytes]) - message / nbytes):.4g}")


def _besides(events: Sequence[Event], first: int, last: int) -> float:
    """Median seconds by which a step of a worker that computes alone is longer than its gradient; 0 if unknown."""
    found = []
    previous: dict[int, float] = {}
    for one in events:
        if isinstance(one, StepEvent):
            if first <= one.step <= last and one.rank in previous:
                found.append(one.seconds - previous[one.rank] - one.compute_seconds)
            previous[one.rank] = one.seconds
    return float(f"{max(0.0, statistics.median(found)):.4g}") if found else 0.0


def _wire(found: dict[tuple[str, str], dict[int, float]], message: float, notes: list[str]) -> ClusterLink:
    """The link of the median pair, from a small and a large message: t = L + b / B + twice the handling time.

    Raises:
        ConfigurationError: between no pair the large message took longer than the small one.
    """
    usable = {pair: sorted(times.items()) for pair, times in found.items()}
    usable = {pair: times for pair, times in usable.items() if times[1][1] > times[0][1]}
    if not usable:
        (small, short), (large, long) = sorted(next(iter(found.values())).items())
        raise ConfigurationError(
            f"a message of {large:,} bytes must take longer than one of {small}, got {formatting.seconds(long)} and "
            f"{formatting.seconds(short)}, from which no bandwidth follows; calibrate while the machine is idle, or "
            "with more --rounds"
        )
    if len(usable) < len(found):
        notes.append(
            f"{many(len(found) - len(usable), 'pair')} of workers left out: a large message took no longer than a "
            "small one, from which no bandwidth follows"
        )
    latencies, bandwidths = [], []
    for (small, short), (large, long) in usable.values():
        per_byte = (long - short) / (large - small)
        latencies.append(max(short - small * per_byte - 2 * message, 0.0))
        bandwidths.append(1 / per_byte)
    for name, values, unit in (
        ("latency", [1e6 * one for one in latencies], "µs"),
        ("bandwidth", [8e-9 * one for one in bandwidths], "Gbit/s"),
    ):
        low, high = min(values), max(values)
        notes.append(
            f"{name} of {many(len(values), 'pair')} of workers: {low:.3g} to {high:.3g} {unit}; the median is used"
        )
        if high > UNEQUAL * low:
            factor = formatting.number(high / max(low, 1e-12), 2)
            notes.append(
                f"pairs of workers differ in {name} by a factor of {factor}: a single link describes these pairs poorly"
            )
    latency, bandwidth = statistics.median(latencies), statistics.median(bandwidths)
    if not latency:
        notes.append("latency is set to 0: a small message takes no longer than its handling at both ends")
    return ClusterLink("node", ("here",), float(f"{bandwidth:.4g}"), float(f"{latency:.4g}"))
