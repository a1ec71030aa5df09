"""Training on the digits with eight workers, whose parts of the data are sorted by label or mixed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flockstep.errors import Diverged
from flockstep.frameworks.base import Data, Job
from flockstep.records.events import ReplicaEvent
from flockstep.strategies.base import ResultPolicy
from flockstep.testing.strategies import equal_bits, run_strategy
from flockstep_lab.claims.base import Say
from flockstep_lab.claims.digits_perceptron import digits_job
from flockstep_lab.claims.spans import GUESSING

WORKERS, STEPS, BATCH, LR = 8, 600, 8, 0.1


@dataclass(frozen=True)
class RunErrors:
    """Test errors, distances and number of messages at the end of a run."""

    error: float
    """Test error of the run's resulting model, in percent."""
    worst: float
    """Test error of the worst replica, in percent."""
    spread: float
    """Root mean square distance of the replicas from their mean."""
    equal: bool
    """Whether all replicas are equal bit for bit."""
    messages: int
    """Number of messages sent by all workers together."""


def parted_job(apart: bool, seed: int) -> Job:
    """Return the job that classifies digits, with the samples sorted by label (`apart`) or shuffled.

    `run_strategy` cuts the samples into equal parts, one per worker.
    """
    job = digits_job(f"sgd(lr={LR})", BATCH)

    def data() -> Data:
        its = job.data()
        order = np.random.default_rng(seed).permutation(len(its.train_y))
        if apart:
            order = order[np.argsort(its.train_y[order], kind="stable")]
        return Data(its.train_x[order], its.train_y[order], its.test_x, its.test_y)

    return replace(job, data=data)


def end_of(strategy: str, apart: bool, seed: int, result: ResultPolicy | None = None, steps: int = STEPS) -> RunErrors:
    """Train on eight equally fast workers, and return the result. A message takes a tenth of the time of a gradient."""
    try:
        run = run_strategy(
            strategy,
            WORKERS,
            steps,
            job=parted_job(apart, seed),
            compute="normal(1, cv=0.1)",
            network="link(bandwidth='10gbit', latency=0.1)",
            seed=seed,
            result=result,
        )
    except Diverged:
        return RunErrors(GUESSING, GUESSING, np.inf, False, 0)
    replicas = run.replicas.astype(np.float64)
    return RunErrors(
        100 * (1 - run.evaluation.metric),
        max(100 * (1 - event.metric) for event in run.of(ReplicaEvent)),
        float(np.sqrt(np.mean(np.square(replicas - replicas.mean(0)).sum(1)))),
        equal_bits(*run.replicas),
        sum(run.totals[rank].messages_sent for rank in range(WORKERS)),
    )


def ends_of(
    strategy: str, apart: bool, seeds: int, say: Say, result: ResultPolicy | None = None, steps: int = STEPS
) -> list[RunErrors]:
    """Train once per seed, show the test errors as a line of progress, and return the results."""
    ends = [end_of(strategy, apart, seed, result, steps) for seed in range(seeds)]
    how = "sorted by label" if apart else "mixed"
    say(f"{strategy}, {how}: " + " ".join(f"{end.error:.1f} (worst worker {end.worst:.1f})" for end in ends))
    return ends
