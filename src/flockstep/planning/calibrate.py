"""Measures the machine at hand, as the description of a cluster."""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flockstep.costs.cluster import ClusterShape
from flockstep.costs.cluster_writing import to_toml
from flockstep.costs.machines import Group, Rates, Wire
from flockstep.errors import ConfigurationError
from flockstep.launchers.threads import limit_threads
from flockstep.launchers.train import train
from flockstep.planning.laws import fit_law
from flockstep.planning.rates import CODECS, OPTIMIZERS, measure_operations, measure_rates
from flockstep.planning.task import task_of
from flockstep.planning.words import many
from flockstep.records.config import RunConfig
from flockstep.records.events import Event, Figure, Step
from flockstep.records.folder import RunFolder
from flockstep.report import words
from flockstep.simulation.law import mean_of

GRADIENTS = 30
"""Of each worker alone, and again with all at once."""
SMALL = 1 << 16
"""Bytes below which a message says little about bandwidth."""
ROUNDS = 20
NEAR = 0.15
"""How far the slow-down may be from that of a whole number of cores before a note says so."""
UNEQUAL = 2.0
"""Ratio from which on pairs are said to differ."""


@dataclass(frozen=True)
class Calibration:
    """A cluster, and what there is to say about how it was found."""

    shape: ClusterShape
    notes: tuple[str, ...]

    def to_toml(self) -> str:
        """The cluster's file, the notes at its head."""
        return to_toml(self.shape, self.notes)


def calibrate(
    job: str = "digits",
    workers: int = 4,
    *,
    transport: str = "shared_memory",
    threads: int = 1,
    gradients: int = GRADIENTS,
    rounds: int = ROUNDS,
    codecs: Sequence[str] = CODECS,
    optimizers: Sequence[str] = OPTIMIZERS,
    say: Callable[[str], None] = lambda what: None,
) -> Calibration:
    """Run the job's gradients on one process and on `workers` at once, messages between each two, codecs, optimisers.

    Raises:
        ConfigurationError: a job, transport or codec that is not there, or too little to measure.
    """
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
        transport=transport,
        threads=threads,
        steps=2 * gradients,
        evaluate_every=float(2 * gradients),
        imports=(str(probe),),
    )
    say(f"gradients of {job} and messages on {many(workers, 'process', 'processes')}")
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder) / "run")
        events = RunFolder(Path(folder) / "run").read_events()
    say("codecs and optimisers")
    limit_threads(threads)
    cores = len(os.sched_getaffinity(0)) // threads
    machine = _Machine(measure_rates(codecs, optimizers), measure_operations(), task_of(job).work, cores)
    return _described(events, job, workers, transport, gradients, machine)


@dataclass(frozen=True)
class _Machine:
    """What one worker gets through, and the operations of the job's gradient; None: not known."""

    rates: Rates
    operations: float
    work: float | None
    cores: int
    """How many workers find a core for each of their threads."""


def _described(
    events: Sequence[Event], job: str, workers: int, transport: str, gradients: int, machine: _Machine
) -> Calibration:
    alone = _computed(events, 2, gradients)
    together = _computed(events, gradients + 2, 2 * gradients)
    count = many(workers, "process", "processes")
    notes = [f"measured by flockstep calibrate: {count} of {job} over {transport} on one machine"]
    cores, times = _sharing(alone, together, workers, notes)
    if cores == workers:  # nobody waited for a core: there may be more
        cores = max(cores, machine.cores)
    fit = fit_law(times)
    notes.append(f"compute is {fit.why}")
    wires, message = [], 0.0
    if workers > 1:
        message = _message(events)
        wires.append(_wire(_figures(events), message, notes))
        notes.append(
            "links were measured one pair at a time: what many messages at once cost each other is not in them"
        )
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    group = Group("here", 1, workers, cores=cores, memory=memory)
    overhead = 0.0
    if machine.work is not None:
        overhead = max(0.0, mean_of(fit.law) - machine.work / machine.operations)
    notes.append(
        "operations are those of a product of matrices, overhead what a gradient of this job takes besides its own: a "
        "rough guess for other jobs"
    )
    notes.append("failures are not measured")
    shape = ClusterShape(
        "here",
        (group,),
        tuple(wires),
        fit.law,
        machine.operations,
        float(f"{overhead:.3g}"),
        f"{job} on this machine",
        job,
        machine.rates,
        message,
    )
    return Calibration(shape, tuple(notes))


def _computed(events: Sequence[Event], first: int, last: int) -> list[float]:
    """Seconds of the gradients numbered first to last, of all workers."""
    return [one.compute for one in events if isinstance(one, Step) and first <= one.step <= last and one.compute > 0]


def _sharing(alone: list[float], together: list[float], workers: int, notes: list[str]) -> tuple[int, list[float]]:
    """How many cores the workers have, and the durations that go with that.

    n workers on c cores take n/c times as long as one alone; c is the number whose slow-down is nearest. Where the
    measured one differs (memory, caches), durations are scaled so that gradients all at once take what they took.
    """
    if workers == 1:
        return 1, together
    slowdown = statistics.fmean(together) / statistics.fmean(alone)  # a few gradients wait for a core, most do not
    notes.append(f"a gradient takes {slowdown:.2f} times as long on average with all {workers} at once as alone")
    cores = min(range(1, workers + 1), key=lambda c: abs(math.log(slowdown * c / workers)))
    if cores == workers:
        return cores, together
    scale = slowdown * cores / workers
    if abs(scale - 1) > NEAR:
        notes.append(f"that is the slow-down of no whole number of cores: durations are {scale:.2f} times those alone")
    return cores, [scale * one for one in alone]


def _figures(events: Sequence[Event]) -> dict[tuple[str, str], dict[int, float]]:
    """Pair → bytes → seconds one way."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for event in events:
        if isinstance(event, Figure) and event.name.startswith("one way "):
            first, second, nbytes = event.name.split()[2:]
            found.setdefault((first, second), {})[int(nbytes)] = event.value
    return found


def _message(events: Sequence[Event]) -> float:
    """Seconds that a node spends on a message; 0 where nobody measured that."""
    found = [event.value for event in events if isinstance(event, Figure) and event.name.startswith("message ")]
    return float(f"{statistics.median(found):.4g}") if found else 0.0


def _wire(found: dict[tuple[str, str], dict[int, float]], message: float, notes: list[str]) -> Wire:
    """The median pair's link: t = L + b / B + twice the handling, through a small and a large message."""
    latencies, bandwidths, large = [], [], 0
    for times in found.values():
        (small, short), (large, long) = sorted(times.items())
        per_byte = max((long - short) / (large - small), 1e-15)
        latencies.append(max(short - small * per_byte - 2 * message, 0.0))
        bandwidths.append(1 / per_byte)
    for name, values, unit in (
        ("latency", [1e6 * one for one in latencies], "µs"),
        ("bandwidth", [8e-9 * one for one in bandwidths], "Gbit/s"),
    ):
        low, high = min(values), max(values)
        notes.append(f"{name} of {many(len(values), 'pair')}: {low:.3g} to {high:.3g} {unit}, the median is taken")
        if high > UNEQUAL * low:
            factor = words.number(high / max(low, 1e-12), 2)
            notes.append(f"pairs differ in {name} by a factor of {factor}: one link says that badly")
    if large < SMALL:
        notes.append(f"messages had {large} bytes at the most: the bandwidth is a rough guess, take a larger model")
    latency, bandwidth = statistics.median(latencies), statistics.median(bandwidths)
    return Wire("node", ("here",), float(f"{bandwidth:.4g}"), float(f"{latency:.4g}"))
