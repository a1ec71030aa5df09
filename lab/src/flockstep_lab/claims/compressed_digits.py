"""Training on the digits with compressed gradients, used by the claims about codecs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.codecs.base import Codec
from flockstep.errors import Diverged
from flockstep.feedback.base import Feedback
from flockstep.records.events import StepEvent
from flockstep.strategies.parameter_server import ParameterServer
from flockstep.testing.strategies import run_strategy
from flockstep.workloads.sampler import steps_for
from flockstep_lab.claims.base import Say
from flockstep_lab.claims.digits_perceptron import digits_job
from flockstep_lab.claims.spans import GUESSING, SAMPLES

WORKERS, LR, EPOCHS = 8, 0.3, 40
LEARNS = 6.0
"""Test error, in percent, above which training with dense gradients counts as failed; in the pilot run the error was
at most 3.3 %.
"""
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Finals:
    """Final results of runs with several seeds; every field is an array with one element per seed."""

    error: Values
    """Test error at the end of each run, in percent."""
    loss: Values
    """Mean training loss of the batches of the last 30 steps; infinite if the run diverged."""
    bits: Values
    """Bits that a worker sent per element of a gradient, counted from its messages."""

    @property
    def median(self) -> float:
        """Median over the seeds of the final test error, in percent."""
        return float(np.median(self.error))

    @property
    def diverged(self) -> int:
        """Number of runs that diverged: some of their parameters became infinite or NaN."""
        return int(np.isinf(self.loss).sum())


def trained(codec: str | Codec, feedback: str | Feedback = "none", *, seeds: int, batch: int, lr: float = LR) -> Finals:
    """Train on the digits with SGD on 8 workers for 40 epochs, and return the results.

    Workers encode their gradients with `codec`, and a server averages the gradients.
    """
    strategy = ParameterServer(codec=Codec.parse(codec), feedback=Feedback.parse(feedback))
    finals = [_trained(strategy, seed, batch, lr) for seed in range(seeds)]
    error, loss, bits = np.array(finals, np.float64).T
    return Finals(error, loss, bits)


def with_progress(say: Say, name: str, finals: Finals) -> Finals:
    """Show the test errors in `finals` as a line of progress, and return `finals`."""
    say(f"{name}: " + " ".join(f"{error:.1f}" for error in finals.error))
    return finals


def _trained(strategy: ParameterServer, seed: int, batch: int, lr: float) -> tuple[float, float, float]:
    steps, job = steps_for(EPOCHS, SAMPLES, WORKERS, batch), digits_job(f"sgd(lr={lr})", batch)
    try:
        run = run_strategy(strategy, WORKERS, steps, job=job, compute="constant(1)", network="ideal", seed=seed)
    except Diverged:
        return GUESSING, np.inf, np.nan
    losses = [event.loss for event in run.of(StepEvent) if event.step > steps - 30 and event.loss is not None]
    bits = 8 * sum(run.totals[rank].sent_bytes for rank in range(WORKERS)) / (WORKERS * steps * len(run.result))
    return 100 * (1 - run.evaluation.metric), float(np.mean(losses)), bits
