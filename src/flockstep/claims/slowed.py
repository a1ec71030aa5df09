"""How much of one worker's delay everyone takes on, in virtual time, and by a plan.

A share compares two runs, one of them with a fault: what all workers together lose of their steps a second, over what
the one that was struck loses. 1: everyone goes at its pace; 1/n: nobody but itself is slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.costs.cluster_reading import read_cluster
from flockstep.messages import HEADER_BYTES
from flockstep.planning.prospect import Pace
from flockstep.planning.rehearsal import rehearse
from flockstep.planning.task import Site, Task
from flockstep.records.events import Step, Update
from flockstep.simulation.compute import ComputeModel, Constant
from flockstep.simulation.law import late_of, mean_of
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import Run, run_strategy, small_job

STEPS, REHEARSED = 240, 1000
MODEL = 18 * 4
"""Bytes of the small job's model."""
TRANSIT = 0.05
"""Seconds that the model takes over a link; a gradient takes one."""
NETWORK = f"link({(MODEL + HEADER_BYTES) / TRANSIT!r}, 0.001)"
LEAST = 0.1
"""Share of its pace that the struck worker has to lose for a fault to say anything."""
VICTIM = 1
WINDOW = (60.0, 120.0)
"""Seconds between which the link is narrow where the pace is to come back."""

CLUSTER = """
compute = "{compute}"
[nodes.machines]
count = {workers}
[[links]]
inside = "machines"
bandwidth = "1gbit"
latency = "50us"
"""
SPELLS = "slow_spells(constant(1), 0.02, 5, 10)"
"""Every fiftieth gradient begins ten that take five times as long."""


@dataclass(frozen=True)
class Loss:
    """Shares of their pace that a fault costs."""

    victim: float
    """The worker that is struck."""
    everyone: float
    """All workers together."""

    @property
    def exercised(self) -> bool:
        """Whether the struck worker itself is slower."""
        return self.victim >= LEAST

    @property
    def share(self) -> float:
        """How much of its loss everyone takes on; NaN where it has none."""
        return self.everyone / self.victim if self.exercised else math.nan


def measured(strategy: str, workers: int, fault: str, victim: int = VICTIM) -> Loss:
    """What a fault of that worker costs."""
    whole, struck = (paces(ends(strategy, workers, faults)) for faults in ((), (fault,)))
    return Loss(float(1 - struck[victim] / whole[victim]), float(1 - struck.sum() / whole.sum()))


def lateness(strategy: str, workers: int, fault: str) -> tuple[float, float]:
    """Mean staleness of what came from the worker, without and with the fault; for a strategy that waits for nobody."""
    runs = (_run(strategy, workers, faults) for faults in ((), (fault,)))
    found = [[event.staleness or 0 for event in run.of(Update) if event.source == VICTIM] for run in runs]
    return float(np.mean(found[0])), float(np.mean(found[1]))


def alone(strategy: str, workers: int) -> tuple[float, float, float]:
    """The worker's own steps a second before its link is narrow, meanwhile, and afterwards."""
    begin, end = WINDOW
    own = ends(strategy, workers, (f"narrows({VICTIM}, 10, at={begin}, until={end})",))[VICTIM]
    before, during, after = own[own < begin], own[(own >= begin) & (own < end)], own[own > end + 10]
    return _pace(before[len(before) // 4 :]), _pace(during[1:]), _pace(after)


def ends(strategy: str, workers: int, faults: Sequence[str]) -> list[npt.NDArray[np.float64]]:
    """When each gradient of every worker was there."""
    steps = _run(strategy, workers, faults).of(Step)
    return [np.array([event.t for event in steps if event.rank == rank]) for rank in range(workers)]


def _run(strategy: str, workers: int, faults: Sequence[str]) -> Run:
    return run_strategy(
        strategy, workers, STEPS, job=small_job(), compute="constant(1)", network=NETWORK, faults=faults
    )  # fmt: skip


def paces(times: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Steps a second of every worker while all of them train, the first quarter of that left out."""
    end = min(own[-1] for own in times)
    return np.array([_pace(own[(own > end / 4) & (own <= end)]) for own in times])


def _pace(times: npt.NDArray[np.float64]) -> float:
    return (len(times) - 1) / float(times[-1] - times[0])


def predicted(strategy: str, workers: int) -> tuple[float, float]:
    """What a plan takes everyone's share of random delays to be beyond their mean, and what virtual time makes of it.

    0: everyone loses the mean delay; 1: everyone loses that of the slowest of each step.
    """
    composed, law = Strategy.parse(strategy), ComputeModel.parse(SPELLS)
    site = Site(Task("stand-in", 10_000), read_cluster(CLUSTER.format(compute=SPELLS, workers=workers), name="even"))
    plan = Pace(composed, site)
    network = site.cluster.network(workers)
    random, steady = (
        rehearse(composed, workers, site.task.nbytes, compute, network, steps=REHEARSED).seconds_per_step
        for compute in (law, Constant(mean_of(law)))
    )
    return plan.exposure, (random - steady) / late_of(law, workers)
