"""Measures the gradients and messages of this machine, and describes the machine as a cluster."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Codec, Shape
from flockstep.costs.cluster import ClusterLink, ClusterShape, MachineGroup, Rates
from flockstep.costs.cluster_file import to_toml
from flockstep.errors import ConfigurationError
from flockstep.launchers.threads import limit_threads
from flockstep.launchers.train import train
from flockstep.optimizers.base import Optimizer
from flockstep.options import MeasureOptions
from flockstep.planning.job_profile import identity, task_of
from flockstep.planning.words import many
from flockstep.records.config import RunConfig
from flockstep.records.events import Event, ScalarEvent, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.report import formatting
from flockstep.report.progress import ProgressCallback, silent
from flockstep.simulation.compute import ComputeModel, ConstantTime, Empirical, Lognormal
from flockstep.simulation.law import mean_of
from flockstep.system import cores

ELEMENTS = 1 << 20
"""Number of elements of the arrays on which rates are measured, equal to that of a model of 4 MB."""
REPEATS = 5
"""Number of rounds of a measurement of rates."""
PRODUCT = 512
"""Number of rows and columns of the square matrices whose product measures floating-point operations per second."""
CODECS = ("half",)
OPTIMIZERS = ("sgd(lr=0.1)", "adam(lr=0.001)")
STEADY = 1e-3
"""Standard deviation, as a share of the mean, below which durations count as constant."""
LOGNORMAL, SLACK = 1.63, 0.05
"""LOGNORMAL: largest distance, times √n, at which n durations count as lognormal: the 1 % bound of the
Kolmogorov-Smirnov test. SLACK is added to the distance, because no model fits exactly.
"""
QUANTILES = 21
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
    messages, of codecs and of optimizers. The result describes a cluster of one machine. `say` is called with lines of
    progress.

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
        data=options.data,
        trust=options.trust,
        key=options.key,
    )
    say(f"gradients of {job} and messages on {many(workers, 'process', 'processes')}")
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
        events = RunFolder(Path(folder) / "run").read_events()
    say("codecs and optimizers")
    limit_threads(options.threads)
    rates, operations = measure_rates(options.codec or CODECS), measure_operations()
    machine = Machine(rates, operations, task_of(job, sealed=options).work, cores() // options.threads)
    count = many(workers, "process", "processes")
    about = f"measured by flockstep calibrate: {count} of {job} over {options.transport} on one machine"
    return described(events, job, workers, gradients, machine, about)


@dataclass(frozen=True)
class Machine:
    """Rates of one worker, and the operations of the job's gradient; None if unknown."""

    rates: Rates
    operations: float
    work: float | None
    cores: int
    """Number of workers that have a core for each of their threads."""


def described(
    events: Sequence[Event], job: str, workers: int, gradients: int, machine: Machine, about: str
) -> Calibration:
    """Return the description of the machine on which the strategy of `probe` recorded `events`.

    Each worker computed `gradients` gradients alone, and then with all workers at once. `about` is the first note.

    Raises:
        ConfigurationError: no bandwidth follows from the messages.
    """
    notes = [about]
    alone, besides, previous = list[float](), list[float](), dict[int, float]()
    together = list[float]()
    for event in events:
        if isinstance(event, StepEvent):
            # The first gradient of either phase warms up.
            for seconds, first, last in ((alone, 2, gradients), (together, gradients + 2, 2 * gradients)):
                if first <= event.step <= last and event.compute_seconds > 0:
                    seconds.append(event.compute_seconds)
            if 2 <= event.step <= gradients and event.rank in previous:
                besides.append(event.seconds - previous[event.rank] - event.compute_seconds)
            previous[event.rank] = event.seconds
    count, times = _sharing(alone, together, workers, notes)
    if count == workers:  # no worker waited for a core: there may be more cores
        count = max(count, machine.cores)
    law, why = fit_law(times)
    notes.append(why)
    wires, message, copy = tuple[ClusterLink, ...](), 0.0, 0.0
    if workers > 1:
        pairs, handling, copies = messages_in(events)
        message = rounded(statistics.median(handling)) if handling else 0.0
        if copies:  # without the handling of its message
            nbytes = max(copies)
            copy = rounded(max(0.0, statistics.median(copies[nbytes]) - message / nbytes))
        wires = (wire_of(pairs, message, notes),)
        notes.append(
            "links were measured one pair of workers at a time: the slowdown of simultaneous messages is not included"
        )
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    group = MachineGroup("here", 1, workers, cores=count, memory=memory)
    overhead = 0.0 if machine.work is None else max(0.0, mean_of(law) - machine.work / machine.operations)
    notes.append(
        "operations per second are measured on a matrix product, and overhead is the remaining time of this job's "
        "gradient: a rough estimate for other jobs"
    )
    notes.append("the rate of failures is not measured")
    shape = ClusterShape(
        "here",
        (group,),
        wires,
        law,
        machine.operations,
        rounded(overhead, 3),
        f"{job} on this machine",
        identity(job),
        machine.rates,
        message,
        copy,
        rounded(max(0.0, statistics.median(besides))) if besides else 0.0,
        servers_apart=group.count > 1,  # in namespaces each server has one of its own
    )
    return Calibration(shape, tuple(notes))


def rounded(value: float, digits: int = 4) -> float:
    """Return a value with as many significant digits as are known."""
    return float(f"{value:.{digits}g}")


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


Pairs = dict[tuple[str, str], dict[int, float]]
"""Pair of workers → message size in bytes → seconds one way."""


def messages_in(events: Sequence[Event]) -> tuple[Pairs, list[float], Mapping[int, list[float]]]:
    """Return what the strategy of `probe` recorded of messages: the seconds one way, the seconds of handling a message,
    and, by size, the seconds that a core spends on a byte.
    """
    pairs, handling, copies = Pairs(), list[float](), defaultdict[int, list[float]](list)
    for event in events:
        if not isinstance(event, ScalarEvent):
            continue
        match event.name.split():
            case "one", "way", first, second, nbytes:
                pairs.setdefault((first, second), {})[int(nbytes)] = event.value
            case "message", _, _:
                handling.append(event.value)
            case "copy", _, nbytes:
                copies[int(nbytes)].append(event.value)
    return pairs, handling, copies


def wire_of(found: Pairs, message: float, notes: list[str]) -> ClusterLink:
    """Return the link of the median pair, from a small and a large message: t = L + b / B + twice the handling time.

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
    return ClusterLink("node", ("here",), rounded(bandwidth), rounded(latency))


def fit_law(seconds: Sequence[float] | FlatArray) -> tuple[ComputeModel, str]:
    """Fit a compute model to durations, and return it with the reason for its choice: constant; lognormal with the
    measured mean; or, if neither fits, the measured quantiles.

    Raises:
        ConfigurationError: there are fewer than two durations, or a duration is not positive.
    """
    times = np.sort(np.asarray(seconds, dtype=np.float64))
    if len(times) < 2 or not times[0] > 0 or not math.isfinite(times[-1]):
        raise ConfigurationError(
            f"a compute model needs at least two durations > 0, got {len(times)} durations, beginning with "
            f"{times[:1]}; measure more steps"
        )
    mean = rounded(float(times.mean()), 6)
    if times.std() < STEADY * times.mean():
        why = (
            f"gradient times are treated as constant: the standard deviation of {len(times)} durations is below "
            f"{STEADY:.1%} of their mean"
        )
        return ConstantTime(mean), why
    logs = np.log(times)
    law = Lognormal(mean, rounded(float(logs.std()), 6))
    center = math.log(law.mean) - law.sigma**2 / 2
    share = np.array([0.5 * math.erfc((center - one) / (law.sigma * math.sqrt(2))) for one in logs])
    steps = np.arange(len(logs) + 1) / len(logs)
    distance = float(max((share - steps[:-1]).max(), (steps[1:] - share).max()))  # of Kolmogorov and Smirnov
    limit = LOGNORMAL / math.sqrt(len(times)) + SLACK
    apart = f"the Kolmogorov-Smirnov distance of {len(times)} durations from a lognormal distribution is {distance:.2f}"
    if distance <= limit:
        return law, f"gradient times are treated as lognormal: {apart}, within the limit of {limit:.2f}"
    at = np.quantile(times, np.linspace(0, 1, QUANTILES))
    # The last quantile reproduces the mean, because it says little about a long tail.
    last = 2 * ((QUANTILES - 1) * times.mean() - at[1:-1].sum()) - at[0]
    if last >= at[-2]:
        at[-1] = last
    else:
        at *= times.mean() / Empirical(tuple(at.tolist())).mean
    why = f"no named distribution fits: {apart}, above the limit of {limit:.2f}"
    quantiles = Empirical(tuple(rounded(one, 6) for one in at.tolist()))
    return quantiles, f"gradient times are described by quantiles, because {why}"


def measure_rates(
    codecs: Sequence[str] = CODECS,
    optimizers: Sequence[str] = OPTIMIZERS,
    elements: int = ELEMENTS,
    rounds: int = REPEATS,
    shapes: Sequence[Shape] = (),
) -> Rates:
    """Measure the elements per second of codecs and optimizers on float32 arrays, in one process: medians over rounds,
    after a warm-up that includes compilation.

    `shapes` gives the shapes of a model's tensors, instead of one matrix of `elements` elements.

    Raises:
        ConfigurationError: a codec or optimizer does not exist.
    """
    if elements < 1 or rounds < 1:
        raise ConfigurationError(f"elements and rounds must be >= 1, got {elements} and {rounds}; 5 rounds are usual")
    rows = math.gcd(elements, 1024)
    shapes = tuple(shapes) or ((rows, elements // rows),)
    elements = sum(map(math.prod, shapes))
    random = np.random.default_rng(0)
    array, out = random.standard_normal(elements, np.float32), np.zeros(elements, np.float32)
    encode, decode, steps = dict[str, float](), dict[str, float](), dict[str, float]()
    for text in codecs:
        codec = Codec.parse(text).bind_shapes(shapes).bind_step(0)
        data = codec.encode(array, random)
        encode[text] = _rate(elements, partial(codec.encode, array, random), rounds)
        decode[text] = _rate(elements, partial(codec.add_decoded, data, out, 0.5), rounds)
    for text in optimizers:
        optimizer = Optimizer.parse(text)
        state = optimizer.init(array)
        state.tensors = (slice(0, elements),)
        steps[text.partition("(")[0]] = _rate(elements, partial(optimizer.step, array, out, state, 1e-3), rounds)
    return Rates(encode, decode, steps)


def measure_operations(size: int = PRODUCT, rounds: int = REPEATS) -> float:
    """Return the floating-point operations per second of a product of two square float32 matrices: the median over
    rounds.
    """
    one, other = np.random.default_rng(0).standard_normal((2, size, size), np.float32)
    return _rate(2 * size**3, partial(np.matmul, one, other, out=np.empty((size, size), np.float32)), rounds)


def _rate(elements: int, action: Callable[[], object], rounds: int) -> float:
    """Elements per second, rounded to four digits."""
    spent = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        action()
        if number:
            spent.append(time.perf_counter() - start)
    return rounded(elements / statistics.median(spent))
