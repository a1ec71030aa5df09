"""Claim: Hogwild!, in which two processes update one sparse model without a lock, is faster than one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flockstep.records.events import EvaluationEvent, Event, ScalarEvent, StepEvent
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded
from flockstep_lab.claims.real_run import events_of
from flockstep_lab.claims.spans import median, ranged
from flockstep_lab.claims.sparse_logistic import COEFFICIENTS, FIELDS

STEPS, BATCH, OPTIMIZER, PENALTY = 6000, 16, "sgd(lr=2)", 1e-5
WARM = 4
"""The first 1/WARM of a run's steps is not timed."""
LEAST, NEAR = 1.6, 0.05
APART = f"local_sgd({2 * STEPS})"
"""Strategy whose workers never synchronize. The speed-up of this strategy with two processes is the largest that the
cores of this machine allow.
"""
KINDS = {"sparse": ("hogwild", 0.0), "dense": ("hogwild", PENALTY), "nothing shared": (APART, 0.0)}
JOB = """from flockstep_lab.claims.sparse_logistic import sparse_job


def job():
    return sparse_job({optimizer!r}, {batch}, {penalty})
"""


class Ran(NamedTuple):
    """Figures of one run: steps per second, number of updates, number of lost updates, and final test loss."""

    rate: float
    """Steps per second of all workers together, while all workers were running."""
    updates: float
    lost: float
    loss: float


@dataclass(frozen=True)
class HogwildSpeedUp(Claim):
    """Claim: two Hogwild! processes take steps almost twice as fast as one process, and lose almost no updates."""

    rounds: int = 5
    statement = (
        "If processes update one sparse model in shared memory without a lock, the number of steps per second grows "
        "almost in proportion to the number of processes, and almost no updates are lost"
    )
    source = "Niu, Recht, Ré & Wright 2011, section 6 and figures 3 to 5"
    setting = (
        f"logistic regression with {FIELDS} categories per sample, {COEFFICIENTS:,} coefficients, {OPTIMIZER}, "
        f"batches of {BATCH}; real processes, {STEPS} steps in total by one process, then by two, 5 rounds, the "
        "first quarter of the steps not timed; in the same rounds, training with weight decay, whose updates are "
        "dense, and with workers that share nothing"
    )
    tolerance = (
        f"steps per second of two processes ÷ those of one process, best rounds: >= {LEAST}; lost updates are counted "
        "in every run: none with one process, none with a lock, some if updates are dense; median final test loss of "
        f"two processes within {NEAR:.0%} of that of one process"
    )

    def check(self, say: Say) -> Verdict:
        """Run each kind of training once per round, so that all kinds see the same load of the machine."""
        runs: dict[tuple[str, int], list[Ran]] = {(kind, workers): [] for kind in KINDS for workers in (1, 2)}
        for _ in range(self.rounds):
            for (kind, workers), found in runs.items():
                found.append(_run(*KINDS[kind], workers))
            rates = (f"{kind} {many} {found[-1].rate:.0f}/s" for (kind, many), found in runs.items())
            say(", ".join(rates))
        best = {kind: _best(runs[kind, 2]) / _best(runs[kind, 1]) for kind in KINDS}
        rows = [bounded("speed-up with sparse updates, ratio of the best rounds", f">= {LEAST}", best["sparse"])]
        rows += [ClaimRow(f"control: speed-up, {k}", "reported", best[k], True) for k in ("dense", "nothing shared")]
        rows += self._losses(runs, _run("hogwild(locked=True)", PENALTY, 2))
        pairs = {k: [b.rate / a.rate for a, b in zip(runs[k, 1], runs[k, 2], strict=True)] for k in KINDS}
        spread = "; ".join(f"{kind} {ranged(ratios)}" for kind, ratios in pairs.items())
        note = f"medians and ranges of the speed-ups of the rounds: {spread}. {_reading(best)}"
        figures = {f"steps per second, {kind}, {many}": _best(found) for (kind, many), found in runs.items()}
        return Verdict(tuple(rows), note, figures)

    def _losses(self, runs: dict[tuple[str, int], list[Ran]], locked: Ran) -> list[ClaimRow]:
        """Rows for the lost updates and the resulting model."""
        alone, two, dense = runs["sparse", 1], runs["sparse", 2], runs["dense", 2]
        after, before = (median(run.loss for run in found) for found in (two, alone))
        share = max(run.lost / run.updates for run in two)
        counted = all(run.updates > 0 and run.lost >= 0 for run in two)
        most = max(run.lost for run in dense)
        none = max(run.lost for run in alone)
        near = abs(after / before - 1) <= NEAR
        return [
            ClaimRow("largest share of lost updates with sparse updates, two processes", "reported", share, counted),
            ClaimRow("lost updates, one process", "0", none, none == 0),
            bounded("control: largest number of lost updates with dense updates, two processes", "> 0", most),
            ClaimRow(
                "control: lost updates with dense updates, two processes with a lock",
                "0",
                locked.lost,
                locked.lost == 0,
            ),
            ClaimRow("test loss, two processes", f"{before:.4f} +- {NEAR:.0%}", after, near),
        ]


def _best(runs: Sequence[Ran]) -> float:
    return max(run.rate for run in runs)


def _reading(best: dict[str, float]) -> str:
    ours, cores = best["sparse"], best["nothing shared"]
    if ours >= LEAST:
        return "The speed-up of processes that share nothing shows what the cores allowed at that time"
    if cores < LEAST:
        return (
            f"Two processes that share nothing were only {cores:.2f} times as fast as one: the machine has fewer "
            "than two free cores, so no method could have reached the limit"
        )
    return (
        f"Two processes that share nothing were {cores:.2f} times as fast as one; the difference between the two "
        "speed-ups is the cost of sharing"
    )


def _run(strategy: str, penalty: float, workers: int) -> Ran:
    """Run the same total number of steps with any number of workers."""
    job, steps = JOB.format(optimizer=OPTIMIZER, batch=BATCH, penalty=penalty), STEPS // workers
    events = events_of(job, strategy, workers, steps, threads=1, evaluate_every=steps)
    figures = {event.name: event.value for event in events if isinstance(event, ScalarEvent)}
    loss = [event.loss for event in events if isinstance(event, EvaluationEvent)][-1]
    return Ran(rate(events, workers), figures.get("updates", 0.0), figures.get("lost_updates", -1.0), loss)


def rate(events: Sequence[Event], workers: int) -> float:
    """Return the steps per second of all workers together.

    Counting begins when every worker has taken a quarter of its steps, and stops when the first worker ends.
    """
    times = [
        sorted(event.seconds for event in events if isinstance(event, StepEvent) and event.rank == rank)
        for rank in range(workers)
    ]
    begin, end = max(t[len(t) // WARM] for t in times), min(t[-1] for t in times)
    if begin >= end:  # one ended before the other was warm: they did not run at the same time
        return sum(len(t) for t in times) / max(t[-1] for t in times)
    return sum(sum(begin < at <= end for at in t) for t in times) / (end - begin)
