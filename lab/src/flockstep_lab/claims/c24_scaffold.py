"""Claim: SCAFFOLD needs fewer rounds than FedAvg where clients' data differ."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.digit_clients import CLIENTS, medians, trained

SIMILARITIES, PARTICIPANTS, PERIOD = (0.0, 0.1, 1.0), 10, 20
TARGET, ROUNDS = 0.9, 60


@dataclass(frozen=True)
class ScaffoldRounds(Claim):
    """Claim: SCAFFOLD beats FedAvg by the more, the less similar the clients' data are."""

    seeds: int = 5
    statement = (
        "SCAFFOLD needs fewer rounds than FedAvg where the clients' data differ, and as many where they are alike"
    )
    source = "Karimireddy, Kale, Mohri, Reddi, Stich & Suresh 2020, table 3 and section 7"
    setting = (
        f"digits on a perceptron, {PARTICIPANTS} of {CLIENTS} clients in a round of {PERIOD} steps; 0, 10 and 100 % of "
        f"a client's samples are drawn from all, the others are sorted by label; rounds to accuracy {TARGET:g}, "
        "medians of 5 seeds"
    )
    tolerance = "SCAFFOLD's rounds at most 0.75 of FedAvg's at 0 %, at most 0.95 at 10 %, and within 30 % at 100 %"

    def check(self, say: Say) -> Verdict:
        """Count the rounds of both for each similarity."""
        rows = []
        for similarity, most in zip(SIMILARITIES, (0.75, 0.95, 1.3), strict=True):
            fedavg, scaffold = (self._rounds(drift, similarity, say) for drift in ("uncorrected", "scaffold"))
            what = f"{100 * similarity:g} % similar: rounds of FedAvg, SCAFFOLD"
            holds = scaffold < math.inf and scaffold <= most * fedavg and (similarity < 1 or fedavg <= most * scaffold)
            rows.append(ClaimRow(what, f"ratio <= {most:g}", f"{fedavg:.0f}, {scaffold:.0f}", holds))
        return Verdict(tuple(rows))

    def _rounds(self, drift: str, similarity: float, say: Say) -> float:
        each = PARTICIPANTS * PERIOD
        strategy = f"federated({PARTICIPANTS}, {PERIOD}, drift={drift}, weighting=equal)"
        ends = [trained(strategy, similarity, seed, ROUNDS * each, target=TARGET) for seed in range(self.seeds)]
        return medians(ends, f"{drift}, {100 * similarity:g} % similar", say).steps / each
