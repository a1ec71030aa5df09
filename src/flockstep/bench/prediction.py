"""Prediction against reality: steps of real processes over links of known bandwidth, beside what was predicted.

What is known of the machines is the record of one strategy at one bandwidth. The prediction of every other strategy
and bandwidth is what `flockstep plan` says of the cluster that is fitted to this record, its links as many times as
fast as the cards are.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flockstep.codecs.identity import Identity
from flockstep.costs.cluster import ClusterShape
from flockstep.costs.machines import Rates
from flockstep.drivers.setup import load_job
from flockstep.errors import ConfigurationError
from flockstep.launchers import namespaces
from flockstep.launchers.train import train
from flockstep.planning.check import measure as measured_in
from flockstep.planning.fit import fit_records
from flockstep.planning.prospect import Prospect, codecs_of, faster, prospect
from flockstep.planning.rates import measure_rates
from flockstep.planning.task import Site, Task, task_of
from flockstep.records.config import RunConfig
from flockstep.records.folder import RunFolder
from flockstep.simulation import units
from flockstep.strategies.base import Strategy

JOB = "softmax(features=20000, train=512, test=64, batch=32)"
"""200,010 parameters: a step takes from 10 ms to 2 s."""
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
CALIBRATED = ("all_reduce", "100mbit")
"""The strategy and the bandwidth of the record that everything is predicted from."""
WITHIN = 0.2
"""Share of the measured time by which a prediction may be wrong."""
RANKED = 0.9
"""Least rank correlation."""
SECONDS = 6.0
"""That a run should last, if it needs not have more steps."""
FEW, SPANS = 14, 3
"""Steps of a run that takes long all the same; how many times 20 counted steps one has at the most."""
HEARTBEAT = 30.0
"""Seconds: on slow links a heartbeat waits behind whole models."""


@dataclass(frozen=True)
class Pair:
    """A strategy at a bandwidth: seconds of a step, as predicted and as measured."""

    strategy: str
    bandwidth: str
    steps: int
    predicted: float
    measured: float
    """Median over the rounds; of each, the median over spans of steps of the mean over all workers."""
    low: float
    high: float

    @property
    def error(self) -> float:
        """By which share of the measured time the prediction is too long."""
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        """Whether that is little."""
        return abs(self.error) <= WITHIN


@dataclass(frozen=True)
class Truth:
    """All pairs, and what the predictions are from."""

    job: str
    workers: int
    cores: int
    efficiency: float
    """Bandwidth fitted to the one record, as a share of the card's."""
    notes: tuple[str, ...]
    pairs: tuple[Pair, ...]

    @property
    def bandwidths(self) -> tuple[str, ...]:
        """In order."""
        return tuple(dict.fromkeys(pair.bandwidth for pair in self.pairs))

    @property
    def ranks(self) -> dict[str, float | None]:
        """Rank correlation of predicted and measured, of each bandwidth and "all"; None of fewer than two pairs."""
        found = {name: [one for one in self.pairs if one.bandwidth == name] for name in self.bandwidths}
        found["all"] = list(self.pairs)
        return {
            name: rank_correlation([one.predicted for one in mine], [one.measured for one in mine])
            for name, mine in found.items()
        }

    @property
    def misses(self) -> list[str]:
        """What does not hold, in words."""
        said = [
            f"{one.strategy} at {one.bandwidth}: {one.error:+.0%}, more than {WITHIN:.0%}"
            for one in self.pairs
            if not one.holds
        ]
        for name, rank in self.ranks.items():
            if rank is not None and rank < RANKED:
                said.append(f"rank correlation, {name}: {rank:.2f}, less than {RANKED}")
        return said

    def sentences(self) -> list[str]:
        """What the predictions are from, how well they rank, and what does not hold."""
        ranks = ", ".join(f"{name} {rank:.3f}" for name, rank in self.ranks.items() if rank is not None)
        held = sum(one.holds for one in self.pairs)
        known = (
            f"{self.workers} processes of {self.job} on {self.cores} cores; all is predicted from one record of "
            f"{CALIBRATED[0]} at {CALIBRATED[1]}, which gives links {self.efficiency:.1%} of their cards' bandwidth"
        )
        return [
            known,
            f"rank correlation: {ranks}" if ranks else "too few strategies to rank",
            f"{held} of {len(self.pairs)} within {WITHIN:.0%}" + "".join(f"\n  {miss}" for miss in self.misses),
        ]

    def document(self) -> dict[str, Any]:
        """As plain data."""
        names = ("job", "workers", "cores", "efficiency", "notes", "ranks", "misses")
        pairs = [{**vars(one), "error": one.error} for one in self.pairs]
        return {**{name: getattr(self, name) for name in names}, "pairs": pairs}


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation, equal values with their mean rank; None if one says nothing of order.

    Raises:
        ConfigurationError: the two are not of the same length.
    """
    if len(one) != len(other):
        raise ConfigurationError(
            f"a rank correlation needs two values of each, got {len(one)} and {len(other)}; leave out what has only one"
        )
    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def rates_of(strategies: Sequence[str]) -> Rates:
    """What is in no record: how fast each worker codes and steps while all do, on the cores that they share."""
    codecs = {
        str(one) for text in strategies for one in codecs_of(Strategy.parse(text)) if not isinstance(one, Identity)
    }
    alone = measure_rates(sorted(codecs))
    share = min(1.0, cores() / WORKERS)
    return Rates(*({name: share * one for name, one in vars(alone)[kind].items()} for kind in vars(alone)))


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def predict(cluster: ClusterShape, task: Task, strategy: str, workers: int, steps: int) -> Prospect:
    """What a plan says of a strategy, in a rehearsal of so many steps where there is one."""
    return prospect(Strategy.parse(strategy), Site(task, cluster), workers, steps=steps)


def steps_for(seconds: float) -> int:
    """How many steps a run should have whose steps last so long, of which a quarter at the beginning does not count.

    What counts divides into five spans of a multiple of four steps, so that whoever meets every four steps does so
    equally often in each; of the slowest there are too few for that.
    """
    spans = min(SPANS, math.floor(SECONDS / (seconds * 26)))
    return max(FEW, 80 * spans // 3)


def measure(
    strategies: Sequence[str] = STRATEGIES,
    bandwidths: Sequence[str] = BANDWIDTHS,
    rounds: int = 1,
    say: Callable[[str], None] = lambda what: None,
    job: str = JOB,
) -> Truth:
    """Calibrate, predict, and run every strategy at every bandwidth.

    Raises:
        ConfigurationError: namespaces are not to be had here, or there is no such strategy, bandwidth or job.
    """
    for text in strategies:
        Strategy.parse(text).check(WORKERS)
    for text in bandwidths:
        units.bandwidth(units.with_unit(text, "bandwidths", "100mbit"), "bandwidths")
    namespaces.require()
    task = task_of(job, None, load_job(job, 0))
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(Path(folder), job)
        say(f"calibrating: {CALIBRATED[0]} at {CALIBRATED[1]}")
        calibration = fit_records([runs.record(*CALIBRATED, 80 * SPANS // 3)])
        known = replace(calibration.shape, rates=rates_of(strategies))
        nominal = units.bandwidth(CALIBRATED[1])
        pairs = []
        for bandwidth in bandwidths:
            cluster = faster(known, units.bandwidth(bandwidth) / nominal)
            for strategy in strategies:
                steps = steps_for(predict(cluster, task, strategy, WORKERS, FEW).seconds)
                predicted = predict(cluster, task, strategy, WORKERS, steps).seconds
                say(f"{strategy} at {bandwidth}: {predicted * 1e3:.3g} ms a step predicted")
                took = sorted(
                    measured_in(RunFolder(runs.record(strategy, bandwidth, steps)).read_events(), WORKERS).seconds
                    for _ in range(rounds)
                )
                pairs.append(Pair(strategy, bandwidth, steps, predicted, statistics.median(took), took[0], took[-1]))
    efficiency = calibration.shape.wires[0].bandwidth / nominal
    return Truth(job, WORKERS, cores(), efficiency, calibration.notes, tuple(pairs))


@dataclass
class _Runs:
    """Runs and their records."""

    folder: Path
    job: str
    count: int = 0

    def record(self, strategy: str, bandwidth: str, steps: int) -> Path:
        """The folder of the record of a new run, evaluated at its end only: that would pass the links too."""
        self.count += 1
        config = RunConfig(
            kind="train",
            job=self.job,
            strategy=strategy,
            workers=WORKERS,
            transport=f"namespaces('{bandwidth}')",
            steps=steps,
            threads=1,
            evaluate_every=float(steps),
            heartbeat=HEARTBEAT,
        )
        folder = self.folder / str(self.count)
        train(config, folder)
        return folder
