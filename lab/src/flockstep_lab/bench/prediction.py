"""Compares predicted with measured seconds per step, for real processes over links of known bandwidth.

The machines are described by a calibration (gradients of one worker alone and of all workers at once, messages, codecs)
and by the records of one strategy at two bandwidths. Every other strategy and bandwidth is predicted as `flockstep
plan` does for that cluster, with the link speed that the two records show.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flockstep.costs.cluster import ClusterShape
from flockstep.errors import ConfigurationError, Interrupted
from flockstep.launchers.train import train
from flockstep.options import MeasureOptions
from flockstep.planning.calibrate import Calibration, calibrate, measure_rates
from flockstep.planning.check import measure as measured_in
from flockstep.planning.fit import fit_records
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.step_prediction import StepPrediction, Unpredictable, predict_step
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.report.progress import ProgressCallback, silent
from flockstep.runtime.setup import load_job
from flockstep.simulation import units
from flockstep.simulation.handling import Overheads
from flockstep.strategies.base import Strategy
from flockstep_lab import namespaces

JOB = "softmax(features=20000, train=512, test=64, batch=32)"
"""The measured job, which has 200,010 parameters; one step takes from 10 ms to 2 s, depending on strategy and
bandwidth.
"""
WORKERS = 4
STRATEGIES = (
    "all_reduce",
    "scatter_reduce",
    "ps",
    "ps(consistency=ssp(3))",
    "ps(consistency=asynchronous)",
    "dpsgd(topology=ring)",
    "local_sgd(period=4)",
    "all_reduce(codec=half)",
    "all_reduce(codec=qsgd)",
    "ps(codec=topk(0.01))",
)
BANDWIDTHS = ("20mbit", "100mbit", "1gbit")
DRAWN = (
    *STRATEGIES,
    "gossip",
    "adpsgd(topology=tree)",
    "sgp",
    "powersgd",
    "local_sgd(period=7)",
    "easgd(period=4)",
    "dpsgd",
    "ps(shards=2)",
    "slice_servers",
    "all_reduce(codec=topk(0.01), feedback=residual)",
)
"""Strategies from which random combinations are drawn."""
JOBS = (JOB, "softmax(features=4000, train=512, test=64, batch=32)", "charlm")
"""Jobs from which random combinations are drawn."""
NUMBERS = (3, 4, 5)
"""Numbers of workers from which random combinations are drawn."""
SPEEDS = ("7mbit", "20mbit", "50mbit", "100mbit", "300mbit", "1000mbit")
"""Bandwidths from which random combinations are drawn, as text such as 100mbit."""
CALIBRATED, ENDS = "all_reduce", ("100mbit", "1000mbit")
"""CALIBRATED: the strategy whose records are the basis of all predictions. ENDS: the two bandwidths at which the
strategy is recorded.
"""
FRAMES = (1448 + 66 + 66 / 2) / 1448
"""Minimum number of bytes that a link carries per payload byte, with the headers of TCP frames and one acknowledgement
for every two frames.
"""
WITHIN = 0.2
"""Largest relative error at which a prediction counts as accurate."""
RANKED = 0.9
"""Smallest rank correlation of predicted and measured times at which predictions count as accurate."""
GRADIENTS, LEAST_GRADIENTS, ROUNDS, TURNS = 30, 3, 3, 3
"""GRADIENTS: number of gradients that each worker computes when the slow link is calibrated, once while the other
workers rest and once while all workers compute. LEAST_GRADIENTS: the same for the fast link, where only messages are of
interest. ROUNDS: number of rounds of large messages between two workers. TURNS: number of iterations of the alternating
fit of the links' latency and of their usable share of the bandwidth.
"""
SECONDS = 6.0
"""Seconds for which a measured run should last; slow runs last longer, because they take at least `FEW` steps."""
FEW, SPANS = 14, 3
"""FEW: minimum number of steps of a run. SPANS: maximum number of spans of 20 steps that are timed in a run."""
HEARTBEAT = 30.0
"""Seconds without an answer after which a node counts as lost; large, because a heartbeat waits behind whole models on
slow links.
"""


@dataclass(frozen=True)
class Pair:
    """Seconds per step of one strategy at one bandwidth, predicted and measured."""

    strategy: str
    bandwidth: str
    steps: int
    predicted: float
    measured: float
    """Measured seconds per step: the median over the rounds, where a round's value is the mean over its counted
    steps.
    """
    low: float
    high: float

    @property
    def error(self) -> float:
        """Relative error of the prediction: positive if the predicted time is too long."""
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        """Whether the magnitude of the error is at most `WITHIN`."""
        return abs(self.error) <= WITHIN


@dataclass(frozen=True)
class Truth:
    """All pairs of predicted and measured seconds per step, with the calibration on which the predictions are based."""

    job: str
    workers: int
    cores: int
    efficiency: float
    """Share of the network card's nominal bandwidth that the recorded run on the slower link reached."""
    notes: tuple[str, ...]
    pairs: tuple[Pair, ...]
    interrupted: str | None = None
    """Sentence that says why the measurement ended before all combinations were measured; None if all were measured."""

    @property
    def bandwidths(self) -> tuple[str, ...]:
        """The measured bandwidths, in the order of their first measurement."""
        return tuple(dict.fromkeys(pair.bandwidth for pair in self.pairs))

    @property
    def ranks(self) -> dict[str, float | None]:
        """Bandwidth, or "all" → Spearman's rank correlation of predicted and measured times; None if there are fewer
        than two pairs.
        """
        found = {name: [one for one in self.pairs if one.bandwidth == name] for name in self.bandwidths}
        found["all"] = list(self.pairs)
        return {
            name: rank_correlation([one.predicted for one in mine], [one.measured for one in mine])
            for name, mine in found.items()
        }

    @property
    def misses(self) -> list[str]:
        """Sentences that say which targets for accuracy the predictions miss."""
        said = [
            f"{one.strategy} at {one.bandwidth}: {one.error:+.0%}, more than {WITHIN:.0%}"
            for one in self.pairs
            if not one.holds
        ]
        for name, rank in self.ranks.items():
            if rank is not None and rank < RANKED:
                said.append(f"the rank correlation for {name} is {rank:.2f}, which is less than {RANKED}")
        return said

    def sentences(self) -> list[str]:
        """Sentences about the basis of the predictions, the rank correlations, and the missed targets for accuracy."""
        ranks = ", ".join(f"{name} {rank:.3f}" for name, rank in self.ranks.items() if rank is not None)
        held = sum(one.holds for one in self.pairs)
        known = (
            f"{self.workers} processes train {self.job} on {self.cores} cores. All predictions use one calibration and "
            f"two recorded runs of {CALIBRATED} at {' and '.join(ENDS)}; in these runs the links reached "
            f"{self.efficiency:.1%} of their nominal bandwidth"
        )
        return [
            known,
            f"rank correlation: {ranks}" if ranks else "there are too few strategies to compare their order",
            f"{held} of {len(self.pairs)} within {WITHIN:.0%}" + "".join(f"\n  {miss}" for miss in self.misses),
        ]

    def document(self) -> dict[str, Any]:
        """Return the measurement as a dictionary, for JSON."""
        names = ("job", "workers", "cores", "efficiency", "notes", "ranks", "misses", "interrupted")
        pairs = [{**vars(one), "error": one.error} for one in self.pairs]
        return {**{name: getattr(self, name) for name in names}, "pairs": pairs}


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for equal values; None if all values of a sequence are equal.

    Raises:
        ConfigurationError: the sequences differ in length.
    """
    if len(one) != len(other):
        raise ConfigurationError(
            f"the two series of a rank correlation must have the same length, got {len(one)} and {len(other)}; pass "
            "one value for each item in both series"
        )
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def coded(strategies: Sequence[str]) -> list[str]:
    """Return the lossy codecs that the given strategies use; a calibration must measure their computing time."""
    found = (Strategy.parse(text).coding for text in strategies)
    return sorted({str(one) for one in found if one is not None and not one.lossless})


@dataclass(frozen=True)
class Known:
    """A calibrated cluster on whose links a byte takes `share` times as long as the network card's nominal bandwidth
    implies.
    """

    calibration: Calibration
    share: float
    copies: tuple[tuple[float, float], ...] = ()
    """Measurements of two network cards, as (bandwidth in bytes per second, seconds that a core spends on each byte).
    If empty, all cards have the calibration's value.
    """

    @classmethod
    def of(
        cls,
        probed: Calibration,
        slow: tuple[Path, float],
        quick: tuple[Path, float],
        copies: tuple[tuple[float, float], ...] = (),
    ) -> Known:
        """Fit the cluster's link to two records, each with its card's bandwidth in bytes per second.

        A step on the slow link is mostly transfer, which gives the share. A step on the fast link also waits for cores
        and for threads to wake up: the fit counts that time as latency, at least the latency of the probe.
        """
        shape = probed.shape
        work = Overheads(shape.message, step=shape.step, copy=shape.copy)
        (wire,) = shape.wires
        latency, share, notes = wire.latency, FRAMES, list(probed.notes)
        for _ in range(TURNS):  # either depends a little on the other
            slowly = fit_records([slow[0]], latency=latency, work=work)
            share = max(FRAMES, slow[1] / slowly.shape.wires[0].bandwidth)
            quickly = fit_records([quick[0]], bandwidth=quick[1] / share, work=work)
            latency = max(wire.latency, quickly.shape.wires[0].latency)
        notes += [*slowly.notes, *quickly.notes]
        wires = (replace(wire, latency=latency, fair=True),)
        return cls(Calibration(replace(shape, wires=wires), tuple(notes)), share, copies)

    def at(self, bandwidth: float) -> ClusterShape:
        """Return the cluster with network cards of `bandwidth` bytes per second."""
        shape = self.calibration.shape
        wires = (replace(shape.wires[0], bandwidth=bandwidth / self.share),)
        return replace(shape, wires=wires, copy=self.copy(bandwidth))

    def copy(self, bandwidth: float) -> float:
        """Return the seconds that a core spends on each byte, with a card of `bandwidth` bytes per second.

        The seconds are linear in 1 / bandwidth, because a core spends its time on segments, which are smaller on slow
        cards.
        """
        if not self.copies:
            return self.calibration.shape.copy
        (slow, most), (quick, least) = self.copies
        return max(0.0, least + (most - least) * (1 / bandwidth - 1 / quick) / (1 / slow - 1 / quick))


def calibrated(runs: _Runs, task: JobProfile, strategies: Sequence[str]) -> Known:
    """Calibrate the cluster, and fit the speed of its links to the records of two runs."""
    probed, brief = (
        calibrate(
            MeasureOptions(
                job=runs.job,
                workers=runs.workers,
                transport=f"namespaces('{end}')",
                gradients=gradients,
                rounds=ROUNDS,
            )
        )
        for end, gradients in zip(ENDS, (GRADIENTS, LEAST_GRADIENTS), strict=True)
    )
    copies = tuple((units.bandwidth(end), one.shape.copy) for end, one in zip(ENDS, (probed, brief), strict=True))
    rates = measure_rates(coded(strategies), shapes=task.tensors)
    slow, quick = ((runs.record(CALIBRATED, text, 80 * SPANS // 3), units.bandwidth(text)) for text in ENDS)
    return Known.of(Calibration(replace(probed.shape, rates=rates), probed.notes), slow, quick, copies)


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def predict(cluster: ClusterShape, task: JobProfile, strategy: str, workers: int, steps: int) -> StepPrediction:
    """Predict the seconds per step of a strategy as `flockstep plan` does.

    If the strategy needs a rehearsal, the rehearsal takes `steps` steps.
    """
    return predict_step(Strategy.parse(strategy), Site(task, cluster), workers, steps=steps)


def steps_for(seconds: float) -> int:
    """Return the number of steps of a run whose steps last `seconds` each; the first quarter of the steps is not
    counted.

    The counted steps divide into five spans of a multiple of four steps, so that a strategy that communicates every
    four steps does so equally often in each span. The slowest runs have too few steps for such spans.
    """
    spans = min(SPANS, math.floor(SECONDS / (seconds * 26)))
    return max(FEW, 80 * spans // 3)


def measure(
    strategies: Sequence[str] = STRATEGIES,
    bandwidths: Sequence[str] = BANDWIDTHS,
    rounds: int = 1,
    say: ProgressCallback = silent,
    job: str = JOB,
    workers: int = WORKERS,
    pairs: Sequence[tuple[str, str]] = (),
) -> Truth:
    """Calibrate, predict, and run every strategy at every bandwidth, or only the combinations in `pairs`.

    A strategy that cannot be predicted is reported to `say` and skipped. If the user interrupts a run, the
    combinations measured before are returned.

    Raises:
        ConfigurationError: network namespaces are not available, or a strategy, bandwidth or job does not exist.
        Interrupted: the user interrupted the calibration.
    """
    pairs = pairs or [(strategy, bandwidth) for bandwidth in bandwidths for strategy in strategies]
    strategies, bandwidths = (list(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
    for text in strategies:
        Strategy.parse(text).check(workers)
    for text in bandwidths:
        units.bandwidth(units.with_unit(text, "bandwidths", "100mbit"), "bandwidths")
    namespaces.require()
    task = task_of(job, None, load_job(job, 0))
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(Path(folder), job, workers)
        say(f"calibrating: {CALIBRATED} at {' and '.join(ENDS)}")
        known = calibrated(runs, task, strategies)
        found, interrupted = [], None
        try:
            for strategy, bandwidth in pairs:
                try:
                    found.append(_pair(runs, known, task, strategy, bandwidth, rounds, say))
                except Unpredictable as why:
                    say(f"{strategy} at {bandwidth}: {why}")
        except (KeyboardInterrupt, Interrupted):
            interrupted = f"interrupted after {len(found)} of {len(pairs)} combinations"
    return Truth(job, workers, cores(), 1 / known.share, known.calibration.notes, tuple(found), interrupted)


def _pair(
    runs: _Runs, known: Known, task: JobProfile, strategy: str, bandwidth: str, rounds: int, say: ProgressCallback
) -> Pair:
    """Predict one combination, and measure it in `rounds` runs."""
    cluster = known.at(units.bandwidth(bandwidth))
    steps = steps_for(predict(cluster, task, strategy, runs.workers, FEW).seconds)
    predicted = predict(cluster, task, strategy, runs.workers, steps).seconds
    say(f"{strategy} at {bandwidth}: predicted {predicted * 1e3:.3g} ms per step")
    records = [RunFolder(runs.record(strategy, bandwidth, steps)).read_events() for _ in range(rounds)]
    took = sorted(measured_in(record, runs.workers).seconds for record in records)
    return Pair(strategy, bandwidth, steps, predicted, statistics.median(took), took[0], took[-1])


def drawn(count: int, seed: int) -> dict[tuple[str, int], list[tuple[str, str]]]:
    """Return (job, number of workers) → pairs (strategy, bandwidth): `count` distinct combinations, drawn at random
    with the seed `seed`.
    """
    every = list(itertools.product(JOBS, NUMBERS, DRAWN, SPEEDS))
    chosen = sorted(np.random.default_rng(seed).choice(len(every), min(count, len(every)), replace=False).tolist())
    found: dict[tuple[str, int], list[tuple[str, str]]] = {}
    for job, workers, strategy, bandwidth in map(every.__getitem__, chosen):
        found.setdefault((job, workers), []).append((strategy, bandwidth))
    return found


def measure_drawn(count: int, seed: int, rounds: int = 1, say: ProgressCallback = silent) -> Truth:
    """Measure `count` combinations of strategy, bandwidth, job and number of workers, drawn at random with the seed
    `seed`.

    If the user interrupts, the combinations measured before are returned.

    Raises:
        ConfigurationError: network namespaces are not available.
        Interrupted: the user interrupted before anything was measured.
    """
    parts, begun = list[Truth](), 0
    for (job, workers), pairs in drawn(count, seed).items():
        note = _placed(say, f"{job}, {workers} workers; combinations measured so far: {begun} of {count}")
        try:
            parts.append(measure(pairs=pairs, rounds=rounds, say=note, job=job, workers=workers))
        except (KeyboardInterrupt, Interrupted) as stop:
            if not parts:
                raise
            return replace(together(parts), interrupted=str(stop) or "interrupted")
        begun += len(pairs)
        if parts[-1].interrupted is not None:
            break
    return replace(together(parts), interrupted=parts[-1].interrupted)


def _placed(say: ProgressCallback, place: str) -> ProgressCallback:
    return lambda what, done=0, total=0: say(f"{what} ({place})", done, total)


def together(parts: Sequence[Truth]) -> Truth:
    """Join several measurements into one; each strategy's name is followed by the number of workers and the job."""
    pairs = [
        replace(pair, strategy=f"{pair.strategy}, {one.workers} × {one.job}") for one in parts for pair in one.pairs
    ]
    notes = tuple(dict.fromkeys(note for one in parts for note in one.notes))
    efficiency = statistics.fmean(one.efficiency for one in parts)
    return Truth("drawn combinations", max(one.workers for one in parts), cores(), efficiency, notes, tuple(pairs))


@dataclass
class _Runs:
    """Runs of one job and their records, in one folder."""

    folder: Path
    job: str
    workers: int
    count: int = 0

    def record(self, strategy: str, bandwidth: str, steps: int) -> Path:
        """Run a strategy and return the folder of its record.

        The model is evaluated at the end only, because snapshots use the links too.
        """
        self.count += 1
        config = RunConfig(
            kind="train",
            job=self.job,
            strategy=strategy,
            workers=self.workers,
            transport=f"namespaces('{bandwidth}')",
            steps=steps,
            threads=1,
            evaluate_every=float(steps),
            heartbeat=HEARTBEAT,
        )
        folder = self.folder / str(self.count)
        train(config, folder)
        return folder
