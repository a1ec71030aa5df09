"""Claim: one attacker ruins the mean of the gradients, while robust aggregations withstand two such attackers."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.errors import Diverged
from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.digits_perceptron import digits_job
from flockstep_lab.claims.spans import median, ranged

WORKERS, STEPS, BATCH, OPTIMIZER = 8, 150, 16, "sgd(lr=0.1, momentum=0.9)"
SMALL = "a little is enough"
RULES = (
    "mean", "median", "trimmed_mean(2)", "krum(2)", "multi_krum(2)", "geometric_median", "centered_clipping(1.0)",
)  # fmt: skip
"""Aggregations, configured for two attackers among eight workers. The radius of centered clipping is about the norm of
an honest gradient.
"""
ATTACKS = {"sign flip": "flips_sign({})", "×1000": "enlarges({})", SMALL: "little_is_enough({}, z=1.5)"}
ATTACKERS = (1, 2)
GUESS = 10.0
"""Accuracy, in percent, of guessing among ten digits; a model that diverged is given this accuracy."""
ROOM, LOST, GUESSED = 10.0, 20.0, 25.0
"""ROOM: largest loss of accuracy with which an aggregation counts as withstanding an attack. LOST: smallest asserted
loss of the coordinate-wise aggregations under the small attack. Both in percentage points, compared with no attackers.
GUESSED: largest accuracy, in percent, of a ruined model.
"""


@dataclass(frozen=True)
class Attackers(Claim):
    """Claim: median, trimmed mean, Krum and other robust aggregations withstand attackers that ruin the mean."""

    seeds: int = 3
    statement = (
        "One of eight workers that sends much too large gradients ruins the mean; median, trimmed mean, Krum, "
        "multi-Krum, geometric median and centered clipping withstand two such attackers; a small attack within the "
        "spread of honest gradients defeats the coordinate-wise rules"
    )
    source = (
        "Blanchard et al. 2017, lemma 1 and section 4; Yin et al. 2018; Karimireddy et al. 2021; Pillutla et al. 2022; "
        "Baruch et al. 2019 for the small attack, with statistics of the attacker's own gradients"
    )
    setting = (
        f"digits on a perceptron, synchronous parameter server with {WORKERS} workers in virtual time, {STEPS} steps "
        f"of {BATCH} samples, {OPTIMIZER}; 0, 1 and 2 attackers in all steps; {seeds} seeds"
    )
    tolerance = (
        f"median accuracy of the seeds: mean under ×1000 <= {GUESSED:g} %; every robust aggregation under sign flip "
        f"and ×1000 within {ROOM:g} points of its accuracy without attackers; median and trimmed mean lose >= "
        f"{LOST:g} points to two attackers with small changes (little_is_enough)"
    )

    def check(self, say: Say) -> Verdict:
        """Train with every aggregation under every attack."""
        found = accuracies(self.seeds, say)
        rows = [
            _row(f"{rule}, {f} of 8, {attack}", found[rule, attack, f], median(found[rule, "none", 0]) - ROOM)
            for rule in RULES[1:]
            for attack in ("sign flip", "×1000")
            for f in ATTACKERS
        ]
        rows += [
            _row(f"control: {rule}, {f} of 8, ×1000", found[rule, "×1000", f], most=GUESSED)
            for rule, f in (("mean", 1), ("mean", 2), ("trimmed_mean(1)", 2))
        ]
        rows += [
            _row(f"{rule}, 2 of 8, {SMALL}", found[rule, SMALL, 2], most=median(found[rule, "none", 0]) - LOST)
            for rule in ("median", "trimmed_mean(2)")
        ]
        figures = {f"{rule}, {f} of 8, {attack}": median(got) for (rule, attack, f), got in found.items()}
        reason = (
            "A sign flip by one or two workers reduces the accuracy of the mean only a little, because six honest "
            "gradients outweigh two; Krum trains on the samples of one worker per step, which reduces its accuracy "
            "even without attackers"
        )
        return Verdict(tuple(rows), reason, figures)


def _row(what: str, got: list[float], least: float = 0.0, most: float = 100.0) -> ClaimRow:
    wanted = f">= {least:.0f}" if least else f"<= {most:.0f}"
    return ClaimRow(f"{what}: accuracy in %", wanted, ranged(got, 1), least <= median(got) <= most)


def accuracies(seeds: int, say: Say) -> dict[tuple[str, str, int], list[float]]:
    """Return a mapping from (aggregation, attack, number of attackers) to the final test accuracies in percent, one
    per seed.
    """
    found = {}
    for rule in RULES:
        found[rule, "none", 0] = [accuracy(rule, [], seed) for seed in range(seeds)]
        for attack, text in ATTACKS.items():
            for f in ATTACKERS:
                faults = [text.format(rank) for rank in range(f)]
                found[rule, attack, f] = [accuracy(rule, faults, seed) for seed in range(seeds)]
        own = {key: ranged(got) for key, got in found.items() if key[0] == rule}
        say(f"{rule}: " + ", ".join(f"{attack} {f}: {got}" for (_, attack, f), got in own.items()))
    enlarged = [ATTACKS["×1000"].format(rank) for rank in range(2)]
    found["trimmed_mean(1)", "×1000", 2] = [accuracy("trimmed_mean(1)", enlarged, seed) for seed in range(seeds)]
    return found


def accuracy(rule: str, faults: list[str], seed: int) -> float:
    """Return the final test accuracy, in percent, of a run with the given aggregation and faults."""
    try:
        run = run_strategy(
            f"ps(bsp, aggregation={rule})", WORKERS, STEPS, job=digits_job(OPTIMIZER, BATCH), compute="constant(0.01)",
            network="ideal", seed=seed, faults=faults,
        )  # fmt: skip
    except Diverged:
        return GUESS
    return 100 * run.evaluation.metric
