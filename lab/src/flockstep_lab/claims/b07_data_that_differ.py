"""Claim: decentralized methods need similar data on all workers; synchronous SGD does not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, bounded
from flockstep_lab.claims.sorted_digits import LR, WORKERS, ends_of
from flockstep_lab.claims.spans import median, ranged

STEPS = 605
"""Number of steps of a run: the pilot's 600 plus five, so that no method averages just before the replicas are
evaluated.
"""
NONE = f"local_sgd({2 * STEPS})"
"""Strategy whose replicas are never synchronized, as a control."""
LEARNS = 7.0
"""Test error, in percent, above which synchronous training counts as failed; in the pilot run the error was at most 5
%.
"""
APART, FACTOR = 1.0, 2.0
"""APART: smallest asserted difference, in percentage points, between the errors of the worst replica and of the mean
model. FACTOR: largest allowed ratio of the measured error to the pilot run's error.
"""
PILOT = {
    "sgp": (4.2, 4.4),
    "local_sgd(10, outer_optimizer=nesterov)": (3.3, 3.9),
    "local_sgd(50, outer_optimizer=nesterov)": (11, 14),
    "dpsgd": (5.3, 6.4),
    "local_sgd(10)": (6.4, 7.2),
    "local_sgd(50)": (16, 18),
    "gossip(0.5)": (4.4, 4.4),
    "gossip(0.1)": (10, 10),
    "gossip(0.01)": (51, 60),
    "sparta(0.05)": (17, 17),
    "sparta(0.005)": (53, 53),
    "easgd(10)": (42, 48),
}
"""Method → smallest and largest test error of the mean model in the pilot run on sorted data, in percent."""
ORDERS = (("sync", "local_sgd(10)", "local_sgd(50)", NONE), ("gossip(0.5)", "gossip(0.1)", "gossip(0.01)"))
"""Groups of methods, each in order of decreasing communication; within a group, errors must increase."""


@dataclass(frozen=True)
class DataThatDiffer(Claim):
    """Claim: with one or two digits per worker, the errors of decentralized methods grow as workers communicate
    less.
    """

    seeds: int = 5
    statement = (
        "If the data of the workers differ, the error of decentralized methods grows as workers communicate less, "
        "and most for the separate model of each worker; synchronous gradients are unaffected, and with mixed data "
        "no method is affected"
    )
    source = (
        "Langer, He, Rahayu & Xue 2020, table 2, column R_LBD. The figures are compared with a pilot run in plain numpy"
    )
    setting = (
        f"digits on a perceptron, {WORKERS} workers in virtual time, {STEPS} steps of 8 samples (the pilot run: 600), "
        f"learning rate {LR}; data sorted by label, or mixed; the mean model of the workers, and the model of each "
        "worker; 5 seeds"
    )
    tolerance = (
        f"median test errors: synchronous <= {LEARNS:g} % and within 1.5 points of mixed data; mean models within a "
        f"factor of {FACTOR:g} of the pilot run, and the worst worker's model >= {APART:g} point worse than the mean "
        "model; for local SGD and gossip, errors rise as communication falls; without communication >= 60 % on "
        "sorted data and <= 10 % on mixed data"
    )

    def check(self, say: Say) -> Verdict:
        """Train each method on data sorted by label, and two methods also on mixed data."""
        mixed = {name: self._errors(name, False, say)[0] for name in ("sync", NONE)}
        apart = {name: self._errors(name, True, say) for name in ("sync", *PILOT, NONE)}
        middle = {name: median(errors) for name, (errors, _) in apart.items()}
        sync, none = median(mixed["sync"]), median(mixed[NONE])
        rows = [
            bounded("synchronous, mixed data: test error in %", f"3 to 5, <= {LEARNS:g}", sync, ranged(mixed["sync"])),
            ClaimRow(
                "synchronous, sorted data: test error in %",
                "3.9 to 4.7",
                ranged(apart["sync"][0]),
                middle["sync"] - min(sync, LEARNS) < 1.5,
            ),
            bounded("no communication, mixed data: test error in %", "3.1 to 5.0, <= 10", none, ranged(mixed[NONE])),
            bounded(
                "no communication, sorted data: test error in %",
                "72 to 77, >= 60",
                middle[NONE],
                ranged(apart[NONE][0]),
            ),
        ]
        rows += [_beside(name, *apart[name]) for name in PILOT]
        for order in ORDERS:
            got = [middle[name] for name in order]
            ours = " < ".join(f"{error:.1f}" for error in got)
            rows.append(ClaimRow(", ".join(order), "rising", ours, all(a < b for a, b in pairwise(got))))
        return Verdict(tuple(rows))

    def _errors(self, name: str, apart: bool, say: Say) -> tuple[list[float], list[float]]:
        ends = ends_of(
            "ps" if name == "sync" else name, apart, self.seeds, say, "server" if name == "sync" else "mean", STEPS
        )
        return [end.error for end in ends], [end.worst for end in ends]


def _beside(name: str, errors: list[float], worst: list[float]) -> ClaimRow:
    """Compare a method's mean model with the pilot's, and its worst replica with its mean model."""
    least, most = PILOT[name]
    near = least / FACTOR <= median(errors) <= most * FACTOR
    published = f"{least:g}" if least == most else f"{least:g} to {most:g}"
    ours = f"{ranged(errors)}; {ranged(worst)}"
    apart = median(worst) >= median(errors) + APART
    return ClaimRow(
        f"{name}, sorted data: test error in % of the mean model; of the worst worker's model",
        published,
        ours,
        near and apart,
    )
