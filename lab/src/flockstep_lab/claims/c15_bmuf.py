"""Claim: local SGD with block momentum (BMUF) needs fewer steps than local SGD with plain averaging."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.records.events import EvaluationEvent
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.digits_perceptron import digits_job

WORKERS = 16
PERIOD = 20
STEPS = 400
TARGET = 0.93
OPTIMIZER, BATCH = "sgd(lr=0.05)", 8


@dataclass(frozen=True)
class BlockMomentum(Claim):
    """Claim: with block momentum (BMUF), workers reach the accuracy of plain averaging in fewer steps."""

    statement = "With block momentum 1 - 1/N, N workers reach the accuracy of plain averaging in fewer steps"
    source = "Chen & Huo 2016, sections 2 and 3"
    setting = (
        f"digits on a perceptron, {OPTIMIZER}, batches of {BATCH}, {WORKERS} workers in virtual time, {STEPS} steps "
        f"with averaging every {PERIOD} steps; median of 5 seeds"
    )
    tolerance = (
        f"steps to accuracy {TARGET}: fewer with classical and with Nesterov block momentum than with plain "
        "averaging; best accuracy at most 0.5 points below that of plain averaging"
    )
    seeds: int = 5

    def check(self, say: Say) -> Verdict:
        steps, best = {}, {}
        for outer in ("average", "bmuf", "bmuf(nesterov=True)"):
            runs = [_trained(outer, seed) for seed in range(self.seeds)]
            steps[outer], best[outer] = map(float, np.median(runs, axis=0))
            say(f"{outer}: {steps[outer]:g} steps, best accuracy {best[outer]:.4f}")
        plain, top, rows = steps["average"], best["average"], []
        for outer in steps.keys() - {"average"}:
            fewer = steps[outer] < plain
            rows.append(
                ClaimRow(f"median number of steps to accuracy {TARGET}, {outer}", f"< {plain:g}", steps[outer], fewer)
            )
            kept = best[outer] >= top - 0.005
            rows.append(ClaimRow(f"best accuracy, {outer}, median", f">= {top - 0.005:.4f}", best[outer], kept))
        note = (
            "all methods use the same local learning rate; in the long run, block momentum therefore acts like a "
            "step that is N times as large"
        )
        return Verdict(
            tuple(sorted(rows, key=lambda row: row.what)), note, {f"steps, {k}": v for k, v in steps.items()}
        )


def _trained(outer: str, seed: int) -> tuple[float, float]:
    """Steps to the target, infinite if it is missed, and the best accuracy."""
    strategy, job = f"local_sgd({PERIOD}, outer_optimizer={outer})", digits_job(OPTIMIZER, BATCH)
    run = run_strategy(
        strategy, WORKERS, STEPS, job=job, compute="constant(1)", network="ideal", seed=seed, evaluate_every=PERIOD
    )
    snapshots = run.of(EvaluationEvent)
    reached = [snapshot.step for snapshot in snapshots if snapshot.metric >= TARGET]
    return min(reached, default=float("inf")), max(snapshot.metric for snapshot in snapshots)
