"""Claim: increasing the batch size has the effect of decreasing the learning rate, with fewer updates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.records.events import EvaluationEvent, StepEvent
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.digits_perceptron import digits_job

BATCH, STEPS, AT, FACTOR = 4, 3000, (0.3, 0.6), 5
SCHEDULES = {
    "lr / 5": f"step_decay({1 / FACTOR}, {AT})",
    "batch x 5": f"batch_increase({FACTOR}, {AT})",
    "neither": "constant",
}
FEWER = 0.3 + 0.3 / FACTOR + 0.4 / FACTOR**2
"""Predicted ratio of the number of updates with growing batches to the number of updates with decaying learning
rates.
"""


@dataclass(frozen=True)
class LargerBatches(Claim):
    """Claim: multiplying the batch size reaches the same error as dividing the learning rate, with fewer updates."""

    seeds: int = 10
    statement = (
        "A schedule that multiplies the batch size instead of dividing the learning rate reaches the same error "
        "after the same number of samples, with fewer updates"
    )
    source = "Smith, Kindermans, Ying & Le 2018, sections 4 and 5 (ResNet-50 to 76.1 % in 30 minutes)"
    setting = (
        "digits on a perceptron 64-64-64-10, one worker with batches of 4 in virtual time, sgd(lr=0.05, "
        "momentum=0.9), 12,000 samples; the learning rate or the batch changes by a factor of 5 after 30 % and 60 % "
        "of the samples; mean of 10 seeds"
    )
    tolerance = (
        "mean errors of both schedules equal within 1 point; ratio of updates as computed, exact; equal numbers of "
        "samples; with neither schedule the error is 5 points larger"
    )

    def check(self, say: Say) -> Verdict:
        """Train with growing batches, with decaying learning rates, and with neither, for every seed."""
        updates, samples, errors = {}, {}, {}
        for name, schedule in SCHEDULES.items():
            steps = round(STEPS * FEWER) if name == "batch x 5" else STEPS
            runs = [_run(schedule, steps, seed) for seed in range(self.seeds)]
            updates[name], samples[name] = runs[0][:2]
            errors[name] = [error for *_, error in runs]
            say(f"{name}: {updates[name]} updates, errors " + " ".join(f"{error:.1f}" for error in errors[name]))
        means = {name: float(np.mean(values)) for name, values in errors.items()}
        (falls, grows, stays), ratio = means.values(), updates["batch x 5"] / updates["lr / 5"]
        rows = (
            ClaimRow("test error in %, learning rate divided by 5", "the same", round(falls, 2), True),
            ClaimRow("test error in %, batch multiplied by 5", "the same", round(grows, 2), abs(grows - falls) <= 1),
            ClaimRow("control: test error in % with neither schedule", "more", round(stays, 2), stays >= grows + 5),
            ClaimRow(
                "updates with growing batches ÷ updates with decaying learning rates",
                round(FEWER, 6),
                ratio,
                abs(ratio - FEWER) < 1e-12,
            ),
            ClaimRow(
                "samples with growing batches ÷ samples with decaying learning rates",
                1.0,
                samples["batch x 5"] / samples["lr / 5"],
                len(set(samples.values())) == 1,
            ),
        )
        return Verdict(
            rows,
            "the batch grows on one worker: several workers whose batches add up to the same batch compute the "
            "same updates",
        )


def _run(schedule: str, steps: int, seed: int) -> tuple[int, int, float]:
    """Updates, samples, and test error in percent."""
    job = digits_job("sgd(lr=0.05, momentum=0.9)", BATCH)
    run = run_strategy(
        "all_reduce", 1, steps, job=job, compute="constant(0.01)", network="ideal", seed=seed, schedule=schedule
    )
    last = run.of(EvaluationEvent)[-1]
    return len(run.of(StepEvent)), last.samples, 100 * (1 - last.metric)
