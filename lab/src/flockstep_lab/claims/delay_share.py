"""Measures what share of one worker's slowdown all workers suffer, in virtual time and as predicted by a plan.

The share compares a run with a fault to a run without the fault: the relative loss of steps per second of all workers
together, divided by the relative loss of the affected worker. 1 means that all workers slow down as much as the
affected worker; 1/n means that only the affected worker is slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.costs.cluster_file import read_cluster
from flockstep.messages import HEADER_BYTES
from flockstep.planning.job_profile import JobProfile, Site
from flockstep.planning.rehearsal import Conditions, rehearse
from flockstep.planning.step_prediction import exposure
from flockstep.records.events import StepEvent, UpdateEvent
from flockstep.simulation.compute import ComputeModel, ConstantTime
from flockstep.simulation.law import late_of, mean_of
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import SimulatedRun, run_strategy, small_job

STEPS, REHEARSED = 240, 1000
MODEL = 18 * 4
"""Size of the small job's model in bytes."""
TRANSIT = 0.05
"""Virtual seconds that the model takes over a link; a gradient takes one virtual second."""
NETWORK = f"link({(MODEL + HEADER_BYTES) / TRANSIT!r}, 0.001)"
LEAST = 0.1
"""Smallest relative loss of the affected worker's throughput for which the share of all workers is computed."""
VICTIM = 1
WINDOW = (60.0, 120.0)
"""Virtual seconds at which a link becomes narrow and at which the link recovers."""

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
"""Compute times with slow spells: with probability 1/50, a gradient begins a series of ten that take five times as
long.
"""


@dataclass(frozen=True)
class ThroughputLoss:
    """Relative losses of throughput (steps per second) that a fault causes, compared with a run without the fault."""

    victim: float
    """Relative loss of throughput of the affected worker."""
    everyone: float
    """Relative loss of throughput of all workers together."""

    @property
    def exercised(self) -> bool:
        """Whether the affected worker loses at least a tenth of its throughput, so that `share` can be computed."""
        return self.victim >= LEAST

    @property
    def share(self) -> float:
        """Loss of all workers divided by the loss of the affected worker; NaN if the affected worker loses less than a
        tenth.
        """
        return self.everyone / self.victim if self.exercised else math.nan


def measured(strategy: str, workers: int, fault: str, victim: int = VICTIM) -> ThroughputLoss:
    """Run a strategy with and without a fault of one worker, and return the relative losses of throughput."""
    whole, faulty = (paces(ends(strategy, workers, faults)) for faults in ((), (fault,)))
    return ThroughputLoss(float(1 - faulty[victim] / whole[victim]), float(1 - faulty.sum() / whole.sum()))


def lateness(strategy: str, workers: int, fault: str) -> tuple[float, float]:
    """Return the mean staleness of the affected worker's updates, without the fault and with the fault."""
    runs = (_run(strategy, workers, faults) for faults in ((), (fault,)))
    found = [[event.staleness or 0 for event in run.of(UpdateEvent) if event.source == VICTIM] for run in runs]
    return float(np.mean(found[0])), float(np.mean(found[1]))


def alone(strategy: str, workers: int) -> tuple[float, float, float]:
    """Return the affected worker's steps per second before, while and after its link is narrow."""
    begin, end = WINDOW
    own = ends(strategy, workers, (f"narrows({VICTIM}, 10, at={begin}, until={end})",))[VICTIM]
    before, during, after = own[own < begin], own[(own >= begin) & (own < end)], own[own > end + 10]
    return _pace(before[len(before) // 4 :]), _pace(during[1:]), _pace(after)


def ends(strategy: str, workers: int, faults: Sequence[str]) -> list[npt.NDArray[np.float64]]:
    """Return, for each worker, the virtual seconds at which the worker finished its gradients."""
    steps = _run(strategy, workers, faults).of(StepEvent)
    return [np.array([event.seconds for event in steps if event.rank == rank]) for rank in range(workers)]


def _run(strategy: str, workers: int, faults: Sequence[str]) -> SimulatedRun:
    return run_strategy(
        strategy, workers, STEPS, job=small_job(), compute="constant(1)", network=NETWORK, faults=faults
    )  # fmt: skip


def paces(times: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Return the steps per second of every worker while all workers train; the first quarter of this time is
    left out.
    """
    end = min(own[-1] for own in times)
    return np.array([_pace(own[(own > end / 4) & (own <= end)]) for own in times])


def _pace(times: npt.NDArray[np.float64]) -> float:
    return (len(times) - 1) / float(times[-1] - times[0])


def predicted(strategy: str, workers: int) -> tuple[float, float]:
    """Return what share of random delays all workers suffer, as (predicted by a plan, measured in virtual time).

    0 means that each step takes the mean time of a gradient; 1 means that each step takes the time of the slowest
    worker.
    """
    composed, law = Strategy.parse(strategy), ComputeModel.parse(SPELLS)
    site = Site(
        JobProfile("surrogate", 10_000), read_cluster(CLUSTER.format(compute=SPELLS, workers=workers), name="even")
    )
    network = site.cluster.network(workers)
    random, steady = (
        rehearse(site.task, composed, workers, Conditions(compute, network), steps=REHEARSED).seconds_per_step
        for compute in (law, ConstantTime(mean_of(law)))
    )
    return exposure(composed, site, workers), (random - steady) / late_of(law, workers)
