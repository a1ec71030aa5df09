"""Claim: if SPARTA averages a few parameters after every step, DiLoCo can synchronize less often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from flockstep.records.events import EvaluationEvent
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded, near
from flockstep_lab.claims.next_character import characters_job
from flockstep_lab.claims.spans import median, ranged

WORKERS, STEPS, BATCH, OPTIMIZER = 8, 4000, 16, "adamw(lr=0.005)"
OFTEN, SELDOM, SHARE = 10, 1000, 0.005
EARLY = SELDOM - 1
"""Steps between two evaluations, chosen so that the last evaluation but one is just before the last synchronization."""
AS_DEAR = 160
"""Period, in steps, with which DiLoCo alone sends slightly more bytes than SPARTA-DiLoCo: 1 / 160 ≥ 0.005 + 1 / 1000
models per step.
"""
MOST = 0.95
FEWER = (1 / OFTEN) / (SHARE + 1 / SELDOM)
COLLECTIVE = "recursive_doubling"


class Ended(NamedTuple):
    """Results of one run: final perplexity, bytes sent, and the state of the replicas just before the last
    synchronization.
    """

    perplexity: float
    bytes: float
    early: float
    """Perplexity of the mean model just before the last synchronization of the longest period."""
    apart: float
    """Distance of the replicas from their mean just before the last synchronization of the longest period."""


@dataclass(frozen=True)
class SpartaDiloco(Claim):
    """Claim: if a random 0.5 % of the parameters are averaged after every step, DiLoCo with long periods reaches a
    lower perplexity.
    """

    seeds: int = 5
    statement = (
        "If 0.5 % of the parameters are averaged after every step, DiLoCo can synchronize 100 times less often, and "
        "reaches a lower perplexity than DiLoCo alone with such long periods"
    )
    source = (
        "Beton et al. 2025 (sparse parameter averaging), the part on DiLoCo: H increased from 100 to 10,000, "
        "perplexity 14.3 % lower"
    )
    setting = (
        f"a small network predicts the next character of the source of Python's standard library; {OPTIMIZER}, "
        f"{WORKERS} workers with batches of {BATCH} in virtual time, {STEPS} steps from random initial parameters; "
        f"synchronization every H = {OFTEN} or {SELDOM} steps; control: DiLoCo alone with H = {AS_DEAR}, which sends "
        "slightly more bytes than SPARTA-DiLoCo; 5 seeds"
    )
    tolerance = (
        f"perplexity of SPARTA-DiLoCo ÷ perplexity of DiLoCo, both with H = {SELDOM}, median of the seeds: <= "
        f"{MOST}; bytes of DiLoCo with H = {OFTEN} ÷ bytes of SPARTA-DiLoCo: {FEWER:.1f} within 1 %"
    )

    def check(self, say: Say) -> Verdict:
        """Train DiLoCo with three periods, and SPARTA-DiLoCo with the longest period."""
        alone = {period: self._runs(_diloco(period), say) for period in (OFTEN, AS_DEAR, SELDOM)}
        both = self._runs(f"sparta({SHARE}, full={_diloco(SELDOM)}, collective={COLLECTIVE})", say)
        over = {period: _ratios(both, runs, "perplexity") for period, runs in alone.items()}
        fewer = alone[OFTEN][0].bytes / both[0].bytes
        dearer = alone[AS_DEAR][0].bytes / both[0].bytes
        rows = (
            bounded(
                f"perplexity of SPARTA-DiLoCo / DiLoCo, both with H = {SELDOM}",
                f"0.857, <= {MOST}",
                median(over[SELDOM]),
                ranged(over[SELDOM], 3),
            ),
            near(f"bytes of DiLoCo with H = {OFTEN} / bytes of SPARTA-DiLoCo", FEWER, fewer, 0.01),
            ClaimRow(
                f"perplexity of SPARTA-DiLoCo / DiLoCo with H = {OFTEN}", "reported", ranged(over[OFTEN], 3), True
            ),
            ClaimRow(
                f"control: perplexity of SPARTA-DiLoCo / DiLoCo with H = {AS_DEAR}",
                "reported",
                ranged(over[AS_DEAR], 3),
                True,
            ),
        )
        close = _ratios(both, alone[SELDOM], "apart")
        early = _ratios(both, alone[SELDOM], "early")
        note = (
            f"the control sends {dearer:.2f} times as many bytes as SPARTA-DiLoCo: a ratio of perplexities above 1 "
            "shows that full averages use the same bytes better. Just before the last synchronization the distance "
            f"of the replicas from their mean was {ranged(close)} times that of DiLoCo, and the perplexity of the "
            f"mean model {ranged(early, 3)} times that of DiLoCo: if the mean of distant replicas is nearly as good, "
            "sparse averages can improve little"
        )
        figures = {f"perplexity, DiLoCo, H = {h}": _middle(runs) for h, runs in alone.items()}
        return Verdict(rows, note, {**figures, "perplexity, SPARTA-DiLoCo": _middle(both)})

    def _runs(self, strategy: str, say: Say) -> list[Ended]:
        runs = [_trained(strategy, seed) for seed in range(self.seeds)]
        say(f"{strategy}: " + " ".join(f"{run.perplexity:.3f}" for run in runs))
        return runs


def _diloco(period: int) -> str:
    return f"local_sgd({period}, {COLLECTIVE}, nesterov)"


def _middle(runs: list[Ended]) -> float:
    return median(run.perplexity for run in runs)


def _ratios(ours: list[Ended], theirs: list[Ended], of: str) -> list[float]:
    """Ratio of a figure for each seed."""
    return [getattr(a, of) / getattr(b, of) for a, b in zip(ours, theirs, strict=True)]


def _trained(strategy: str, seed: int) -> Ended:
    job, network = characters_job(OPTIMIZER, BATCH), "ideal"
    run = run_strategy(
        strategy, WORKERS, STEPS, job=job, compute="constant(1)", network=network, seed=seed, evaluate_every=EARLY
    )
    *_, before, last = run.of(EvaluationEvent)
    assert before.divergence is not None
    return Ended(math.exp(last.loss), last.sent_bytes, math.exp(before.loss), before.divergence)
