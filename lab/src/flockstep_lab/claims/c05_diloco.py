"""Claim: DiLoCo reaches about the loss of synchronous training, and a lower loss than other outer optimizers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.records.events import EvaluationEvent
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.next_character import characters_job

WORKERS = 8
STEPS = 2000
PERIODS = (10, 50, 100)
OPTIMIZER, BATCH = "adamw(lr=0.005)", 16
OUTERS = {"average": PERIODS, "nesterov": PERIODS, "adam": PERIODS[1:2]}
DDP = "all_reduce(recursive_doubling)"
MOST = 1.03


@dataclass(frozen=True)
class Diloco(Claim):
    """Claim: local AdamW with an outer Nesterov step every H steps reaches about the loss of synchronous training."""

    statement = (
        "DiLoCo with an outer Nesterov optimizer reaches about the loss of synchronous training with the same "
        "batches, with H times less communication, and a lower loss than with plain averaging or an outer Adam "
        "optimizer"
    )
    source = "Douillard et al. 2023, table 2 (perplexity 15.02 against 15.30) and section 3.2"
    setting = (
        f"a small network predicts the next character of the source of Python's standard library; {OPTIMIZER}, "
        f"{WORKERS} workers with batches of {BATCH} in virtual time, {STEPS} steps from random initial parameters; "
        f"synchronization every H steps, with H = {', '.join(map(str, PERIODS))} (outer Adam: only {PERIODS[1]}); "
        "5 seeds"
    )
    tolerance = (
        "median final test loss: DiLoCo at most 3 % above all-reduce, and below plain averaging and outer Adam with "
        "the same H; bytes of all-reduce ÷ bytes of DiLoCo exactly H"
    )
    seeds: int = 5

    def check(self, say: Say) -> Verdict:
        loss, sent = self._median(DDP, say)
        found = {
            (outer, period): self._median(f"local_sgd({period}, recursive_doubling, {outer})", say)
            for outer, periods in OUTERS.items()
            for period in periods
        }
        rows = []
        for period in PERIODS:
            ours, less = found["nesterov", period]
            limit = MOST * loss
            rows.append(
                ClaimRow(f"final loss with outer Nesterov steps, H = {period}", f"<= {limit:.4f}", ours, ours <= limit)
            )
            rows.append(ClaimRow(f"bytes, all-reduce ÷ H = {period}", period, sent / less, sent == period * less))
        for (outer, period), (other, _) in found.items():
            ours = found["nesterov", period][0]
            if outer != "nesterov":
                what = f"final loss with outer Nesterov steps, H = {period}, compared with {outer}"
                rows.append(ClaimRow(what, f"<= {other:.4f}", ours, ours <= other))
        figures = {f"loss, {outer}, H = {period}": value for (outer, period), (value, _) in found.items()}
        figures |= {f"loss of DiLoCo / loss of all-reduce, H = {p}": found["nesterov", p][0] / loss for p in PERIODS}
        note = (
            f"H = {PERIODS[-1]} allows only {STEPS // PERIODS[-1]} outer steps; the paper takes 176 outer steps, one "
            "every 500 steps"
        )
        return Verdict(tuple(rows), note, {"loss, all-reduce": loss, **figures})

    def _median(self, strategy: str, say: Say) -> tuple[float, float]:
        """Median final test loss, and bytes per worker, which are equal for all seeds."""
        runs = [_trained(strategy, seed) for seed in range(self.seeds)]
        loss = float(np.median([run[0] for run in runs]))
        say(f"{strategy}: {loss:.4f}")
        return loss, runs[0][1]


def _trained(strategy: str, seed: int) -> tuple[float, float]:
    job = characters_job(OPTIMIZER, BATCH)
    run = run_strategy(strategy, WORKERS, STEPS, job=job, compute="constant(1)", network="ideal", seed=seed)
    last = run.of(EvaluationEvent)[-1]
    return last.loss, last.sent_bytes
