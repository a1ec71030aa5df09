"""Decentral methods need data that are alike on all workers; synchronous gradients do not."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from flockstep.claims.base import Claim, Row, Say, Verdict
from flockstep.claims.sorted_digits import LR, STEPS, WORKERS, ends_of
from flockstep.claims.spans import median, ranged

NONE = f"local_sgd({STEPS})"
"""Replicas are averaged once, at the end."""
PILOT = {
    "sgp": "4.2 to 4.4",
    "local_sgd(10, outer=nesterov)": "3.3 to 3.9",
    "local_sgd(10)": "6.4 to 7.2",
    "local_sgd(50)": "16 to 18",
    "gossip(0.5)": "4.4",
    "gossip(0.1)": "10",
    "gossip(0.01)": "51 and more",
    "sparta(0.05)": "17",
    "sparta(0.005)": "53",
    "easgd(10)": "42 to 48",
}
"""Errors in per cent of the mean model on sorted data."""
ORDERS = (("sync", "local_sgd(10)", "local_sgd(50)", NONE), ("gossip(0.5)", "gossip(0.1)", "gossip(0.01)"))
"""Less and less communication."""


@dataclass(frozen=True)
class DataThatDiffer(Claim):
    """The error of the mean model, and of each worker's own, where every worker knows a digit or two."""

    seeds: int = 5
    statement: ClassVar[str] = (
        "Where the workers' data differ, the error of decentral methods grows the less they communicate, that of each "
        "worker's own model most; synchronous gradients do not mind, and with mixed data nothing shows"
    )
    source: ClassVar[str] = (
        "Langer, He, Rahayu & Xue 2020, table 2, column R_LBD. The figures to compare with are those of a pilot run in "
        "plain numpy"
    )
    setting: ClassVar[str] = (
        f"digits on a perceptron, {WORKERS} workers in virtual time, {STEPS} steps of 8 samples, learning rate {LR}; "
        "data sorted by label, or mixed; the mean of the workers' models, and each worker's own; 5 seeds"
    )
    tolerance: ClassVar[str] = (
        "medians: synchronous within 1.5 points of mixed data; errors in the order of the communication for local SGD "
        "and gossip; without communication >= 60 % on sorted, <= 10 % on mixed data; worst worker's own >= mean model's"
    )

    def check(self, say: Say) -> Verdict:
        """Sorted by label, beside mixed."""
        mixed = {name: self._errors(name, False, say)[0] for name in ("sync", NONE)}
        apart = {name: self._errors(name, True, say) for name in ("sync", *PILOT, NONE)}
        middle = {name: median(errors) for name, (errors, _) in apart.items()}
        sync, none = median(mixed["sync"]), median(mixed[NONE])
        rows = [
            Row("synchronous, mixed data, error in %", "3 to 5", ranged(mixed["sync"]), True),
            Row("synchronous, sorted data", "3.9 to 4.7", ranged(apart["sync"][0]), middle["sync"] - sync < 1.5),
            Row("no communication, mixed data", "3.1 to 5.0, <= 10", ranged(mixed[NONE]), none <= 10),
            Row("no communication, sorted data", "72 to 77, >= 60", ranged(apart[NONE][0]), middle[NONE] >= 60),
        ]
        for name, published in PILOT.items():
            errors, worst = apart[name]
            ours = f"{ranged(errors)}; {ranged(worst)}"
            rows.append(
                Row(f"{name}, sorted data; worst worker's own", published, ours, median(worst) >= median(errors))
            )
        for order in ORDERS:
            got = [middle[name] for name in order]
            ours = " < ".join(f"{error:.1f}" for error in got)
            rows.append(Row(", ".join(order), "rising", ours, all(a < b for a, b in pairwise(got))))
        return Verdict(tuple(rows))

    def _errors(self, name: str, apart: bool, say: Say) -> tuple[list[float], list[float]]:
        ends = ends_of("ps" if name == "sync" else name, apart, self.seeds, say, "server" if name == "sync" else "mean")
        return [end.error for end in ends], [end.worst for end in ends]
