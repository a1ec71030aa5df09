"""Claim: backup workers shorten the steps of synchronous SGD by a predicted time."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.simulation.compute import ComputeModel
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, near, same
from flockstep_lab.claims.update_trace import harmonic, timed

LAW = "exponential(1)"
STEPS = {(16, 0): 5000, (16, 1): 5000, (16, 2): 5000, (100, 0): 4000, (96, 4): 1500}
"""(N workers, b backup workers) → number of steps of a run, enough for standard errors of the mean of at most
0.55 %.
"""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BackupWorkersRuntime(Claim):
    """Claim: with b backup workers, a step of synchronous SGD takes as long as the N-th fastest of N + b workers."""

    statement = (
        "With b backup workers a step takes as long as the N-th fastest of N + b workers; for exponential gradient "
        "times this is H_(N+b) - H_b mean gradient times: using 4 of 100 workers as backups saves 40 % of the time"
    )
    source = "Chen, Pan, Monga, Bengio & Jozefowicz 2016; Abadi et al. 2016, section 4.4"
    setting = (
        "parameter server, 16 to 18 and 100 workers, virtual time, the same random gradient times with and without "
        "backups, messages that take no time"
    )
    tolerance = (
        "mean step time within 1 %; every step ends with the N-th order statistic of its gradient times, bit for "
        "bit; no step ends later than without backups for the same gradient times"
    )

    def check(self, say: Say) -> Verdict:
        """Compare the step times for each number of backup workers with the formula and with the times without backup
        workers. Also check that each step ends with the gradient of the N-th fastest worker.
        """
        rows, ends = [], {}
        for (n, b), steps in STEPS.items():
            ends[n, b] = found = _ends(n, b, steps)
            mean = float(found[-1] / steps)
            expected = harmonic(n + b) - harmonic(b)
            rows.append(near(f"{n}+{b} workers: seconds per step", expected, mean, 0.01))
            exact = int((found == _order_statistics(n, b, steps)).sum())
            rows.append(same(f"{n}+{b} workers: steps that end with the {n}th fastest worker", steps, exact))
            say(f"{n}+{b} workers: {mean:.3f} s per step, {expected:.3f} s expected")
        for few, all_of_them in (((16, 1), (16, 0)), ((16, 2), (16, 0)), ((96, 4), (100, 0))):
            later = int((ends[few] > ends[all_of_them][: len(ends[few])]).sum())
            what = "{}+{} workers: steps that end later than with {}+{} workers".format(*few, *all_of_them)
            rows.append(same(what, 0, later))
        backed, everyone = ends[96, 4], ends[100, 0]
        saved = float(1 - backed[-1] / len(backed) / (everyone[-1] / len(everyone)))
        rows.append(ClaimRow("96+4 over 100+0: time saved", 0.4, saved, abs(saved - 0.4) <= 0.01))
        return Verdict(tuple(rows))


def _ends(n: int, b: int, steps: int) -> Seconds:
    """Virtual seconds at which each step took effect."""
    trace = timed(f"ps(consistency=backup({b}))", n + b, steps, LAW)[0]
    assert len(trace.t) == n * steps
    return trace.t[::n]


def _order_statistics(n: int, b: int, steps: int) -> Seconds:
    """The times of the steps, from the random draws alone: each step begins when the previous step has ended."""
    streams = [ComputeModel.parse(LAW).stream(0, rank) for rank in range(n + b)]
    draws = np.array([list(itertools.islice(stream, steps)) for stream in streams])
    ends, t = [], 0.0
    for durations in draws.T:
        t = float(np.partition(t + durations, n - 1)[n - 1])
        ends.append(t)
    return np.array(ends)
