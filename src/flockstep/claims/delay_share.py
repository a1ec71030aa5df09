"""Measures which share of one worker's delay all workers suffer, in virtual time and as predicted by a plan.

A share compares a run with a fault to a run without the fault: the loss of steps per second of all workers together,
divided by the loss of the affected worker. 1 means that all workers slow down as much as the affected worker; 1/n means
that only the affected worker is slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.costs.cluster_reading import read_cluster
from flockstep.messages import HEADER_BYTES
from flockstep.planning.job_profile import JobProfile, Site
from flockstep.planning.rehearsal import rehearse
from flockstep.planning.step_prediction import Pace
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel, ConstantTime
from flockstep.simulation.law import late_of, mean_of
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import SimulatedRun, run_strategy, small_job

STEPS, REHEARSED = 240, 1000
MODEL = 18 * 4
"""Size of the small job's model in bytes."""
TRANSIT = 0.05
"""Virtual seconds that the model takes over a link; a gradient takes one second."""
NETWORK = f"link({(MODEL + HEADER_BYTES) / TRANSIT!r}, 0.001)"
LEAST = 0.1
"""Smallest loss of the affected worker's throughput, as a share, for which the share of all workers is computed."""
VICTIM = 1
WINDOW = (60.0, 120.0)
"""Virtual seconds at which the link becomes narrow and at which it recovers, in the test of recovery."""

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
"""Compute times with bad spells: with a probability of 1/50, a gradient begins a series of ten that take five times as
long.
"""


@dataclass(frozen=True)
class ThroughputLoss:
    """Losses of throughput that a fault causes, as shares of the throughput without the fault."""

    victim: float
    """Share of its own throughput that the affected worker loses."""
    everyone: float
    """Share of the total throughput that all workers together lose."""

    @property
    def exercised(self) -> bool:
        """Whether the affected worker itself loses throughput, so that a share can be computed."""
        return self.victim >= LEAST

    @property
    def share(self) -> float:
        """Share of the affected worker's loss that all workers suffer; NaN if the affected worker has no loss."""
        return self.everyone / self.victim if self.exercised else math.nan


def measured(strategy: str, workers: int, fault: str, victim: int = VICTIM) -> ThroughputLoss:
    """Measure the losses of throughput that a fault of one worker causes."""
    whole, faulty = (paces(ends(strategy, workers, faults)) for faults in ((), (fault,)))
    return ThroughputLoss(float(1 - faulty[victim] / whole[victim]), float(1 - faulty.sum() / whole.sum()))


def lateness(strategy: str, workers: int, fault: str) -> tuple[float, float]:
    """Mean staleness of the affected worker's updates without and with the fault, for a strategy in which no worker
    waits.
    """
    runs = (_run(strategy, workers, faults) for faults in ((), (fault,)))
    found = [[event.staleness or 0 for event in run.of(UpdateEvent) if event.source == VICTIM] for run in runs]
    return float(np.mean(found[0])), float(np.mean(found[1]))


def alone(strategy: str, workers: int) -> tuple[float, float, float]:
    """The affected worker's steps per second before, during and after the time in which its link is narrow."""
    begin, end = WINDOW
    own = ends(strategy, workers, (f"narrows({VICTIM}, 10, at={begin}, until={end})",))[VICTIM]
    before, during, after = own[own < begin], own[(own >= begin) & (own < end)], own[own > end + 10]
    return _pace(before[len(before) // 4 :]), _pace(during[1:]), _pace(after)


def ends(strategy: str, workers: int, faults: Sequence[str]) -> list[npt.NDArray[np.float64]]:
    """Virtual seconds at which every worker finished each of its gradients."""
    steps = _run(strategy, workers, faults).of(StepEvent)
    return [np.array([event.seconds for event in steps if event.rank == rank]) for rank in range(workers)]


def _run(strategy: str, workers: int, faults: Sequence[str]) -> SimulatedRun:
    return run_strategy(
        strategy, workers, STEPS, job=small_job(), compute="constant(1)", network=NETWORK, faults=faults
    )  # fmt: skip


def paces(times: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Steps per second of every worker while all workers train; the first quarter of that time is left out."""
    end = min(own[-1] for own in times)
    return np.array([_pace(own[(own > end / 4) & (own <= end)]) for own in times])


def _pace(times: npt.NDArray[np.float64]) -> float:
    return (len(times) - 1) / float(times[-1] - times[0])


def predicted(strategy: str, workers: int) -> tuple[float, float]:
    """Which share of random delays beyond their mean all workers suffer: predicted by a plan, and measured in virtual
    time.

    0 means that all workers lose the mean delay, 1 that all workers lose the delay of the slowest worker in each step.
    """
    composed, law = Strategy.parse(strategy), ComputeModel.parse(SPELLS)
    site = Site(
        JobProfile("surrogate", 10_000), read_cluster(CLUSTER.format(compute=SPELLS, workers=workers), name="even")
    )
    plan = Pace(composed, site)
    network = site.cluster.network(workers)
    random, steady = (
        rehearse(composed, workers, site.task.nbytes, compute, network, steps=REHEARSED).seconds_per_step
        for compute in (law, ConstantTime(mean_of(law)))
    )
    return plan.exposure, (random - steady) / late_of(law, workers)
