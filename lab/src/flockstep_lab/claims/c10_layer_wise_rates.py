"""Claim: layer-wise learning rates work at batch sizes at which one scaled learning rate with gradual warm-up fails."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep_lab.claims.b03_gradual_warmup import GRADUAL, LR, STRATEGY, WARMUPS, warmed_up
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded
from flockstep_lab.claims.spans import errors_of

WORKERS = (32, 64)
LARS, LAMB = 20.0, 0.04
"""Learning rates of LARS and of LAMB after the warm-up, the same for every number of workers."""


@dataclass(frozen=True)
class LayerWiseRates(Claim):
    """Claim: the optimizers LARS and LAMB, with layer-wise learning rates, train at batch sizes at which SGD fails."""

    seeds: int = 5
    statement = (
        "LARS and LAMB train at batch sizes at which SGD with a scaled learning rate and a gradual warm-up diverges"
    )
    source = "You, Gitman & Ginsburg 2017 (ResNet-50 at 32 k); You et al. 2020 (BERT at 32,868)"
    setting = (
        "the digits as in claim B3, 32 and 64 workers with batches of 16, 40 epochs including 5 of gradual warm-up; "
        "optimizers lars(lr=20), lamb(lr=0.04) and sgd(lr=0.05 k, momentum=0.9) for k workers; small batch: 1 "
        "worker; mean of 5 seeds"
    )
    tolerance = "mean test errors: SGD >= 50 %; LARS and LAMB at most 3 points above the small batch"

    def check(self, say: Say) -> Verdict:
        """Train with LARS, LAMB and SGD, with each number of workers and each seed."""
        sgd = f"sgd(lr={LR}, momentum=0.9)"
        small = self._mean(sgd, 1, WARMUPS["none"], say)
        rows = [ClaimRow("test error in %, small batch", "test error of the large batch", round(small, 2), True)]
        for k in WORKERS:
            error = self._mean(sgd, k, GRADUAL, say)
            rows.append(bounded(f"sgd, {k} workers, test error in %", ">= 50", error, round(error, 2)))
            for name, rate in (("lars", LARS), ("lamb", LAMB)):
                error = self._mean(f"{name}(lr={rate / k})", k, GRADUAL, say)
                rows.append(
                    ClaimRow(
                        f"{name}, {k} workers, test error in %",
                        "<= small batch + 3",
                        round(error, 2),
                        error <= small + 3,
                    )
                )
        return Verdict(tuple(rows), f"40 epochs on {WORKERS[-1]} workers are only 57 updates")

    def _mean(self, optimizer: str, workers: int, schedule: str, say: Say) -> float:
        return float(np.mean(errors_of(STRATEGY, warmed_up(optimizer, workers, schedule), self.seeds, say)))
