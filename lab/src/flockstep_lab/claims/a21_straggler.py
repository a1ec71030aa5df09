"""Claim: one slow worker delays synchronous training, but hardly delays pairwise averaging."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.records.events import StepEvent
from flockstep.testing.strategies import bowl_job, run_strategy
from flockstep_lab.claims.base import Claim, Say, Verdict, near

SECONDS = 400
"""Virtual seconds during which gradients are counted; a gradient of a fast worker takes one second."""
CASES = [(8, 2, 1.875), (8, 10, 8.875), (8, 100, 87.6), (16, 10, 9.44)]
"""Cases as (number of workers, factor by which one worker is slower, published ratio of gradients per second of
AD-PSGD to synchronous training).
"""
LATENCY, BANDWIDTH = "50us", "10gbit"


@dataclass(frozen=True)
class Straggler(Claim):
    """Claim: if one worker is slow, AD-PSGD continues at the pace of the other workers."""

    statement = (
        "With one of P workers s times as slow, pairwise averaging computes s (P - 1 + 1/s) / P times as many "
        "gradients per second as synchronous training"
    )
    source = (
        "Lian, Zhang, Zhang & Liu 2018, abstract (4 to 8 times faster epochs on shared clusters) and section 5.4; "
        "closed form: synchronous training computes P gradients in s seconds, pairwise averaging P - 1 + 1/s "
        "gradients per second"
    )
    setting = (
        "quadratic objective; strategies adpsgd(ring) and all_reduce; one second per gradient; virtual network with "
        f"a bandwidth of {BANDWIDTH} and a latency of {LATENCY}; gradients counted over {SECONDS} virtual seconds"
    )
    tolerance = "within 3 % of the closed form, for P = 8 with s = 2, 10 and 100, and for P = 16 with s = 10"
    quick = True

    def check(self, say: Say) -> Verdict:
        rows, figures = [], {}
        for workers, slow, published in CASES:
            say(f"{workers} workers, one of which is {slow} times as slow")
            free, together = (self._pace(strategy, workers, slow) for strategy in ("adpsgd", "all_reduce"))
            ratio = free / together
            rows.append(
                near(
                    f"gradients per second of AD-PSGD ÷ of synchronous training, P = {workers}, s = {slow}",
                    published,
                    ratio,
                    0.03,
                )
            )
            figures[f"gradients per second of D-PSGD ÷ of synchronous training, P = {workers}, s = {slow}"] = (
                self._pace("dpsgd", workers, slow) / together
            )
        even = self._pace("adpsgd", 8, 1) / self._pace("all_reduce", 8, 1)
        rows.append(
            near(
                "gradients per second of AD-PSGD ÷ of synchronous training, without a slow worker, P = 8",
                1.0,
                even,
                0.03,
            )
        )
        most = max(figures.values())
        note = (
            f"D-PSGD, which waits for its neighbors, computes at most {most:.3g} times as many gradients per second as "
            "synchronous training"
        )
        return Verdict(tuple(rows), note, figures)

    def _pace(self, strategy: str, workers: int, slow: int) -> float:
        """Gradients per second while all workers train."""
        free = strategy == "adpsgd"
        steps = SECONDS if free else SECONDS // 4
        run = run_strategy(
            strategy,
            workers,
            steps,
            job=bowl_job(),
            compute="constant(1)",
            network=f"link(bandwidth={BANDWIDTH!r}, latency={LATENCY!r})",
            faults=[f"slows(1, {slow})"],
        )
        steps_at = [event.seconds for event in run.of(StepEvent)]
        until = max(e.seconds for e in run.of(StepEvent) if e.rank == 0)
        return sum(t <= until for t in steps_at) / until
