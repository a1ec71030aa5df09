"""Claim: more local passes and more clients in a round need fewer rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product

from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.digit_clients import CLIENTS, medians, trained

EPOCHS, PARTICIPANTS, STEPS_OF_EPOCH = (1, 5, 20), (5, 25), 3
TARGET, ROUNDS = 0.85, 60


@dataclass(frozen=True)
class FederatedAveraging(Claim):
    """Claim: FedAvg reaches a target in fewer rounds with more local passes, and with more clients in each round."""

    seeds: int = 5
    statement = (
        "Where clients have two labels each, FedAvg needs fewer rounds with 5 local passes than with 1, hardly fewer "
        "with 20, and fewer with half of the clients in each round than with a tenth"
    )
    source = "McMahan, Moore, Ramage, Hampson & Aguera y Arcas 2017, tables 1 and 2 (their shape, not their figures)"
    setting = (
        f"digits on a perceptron, {CLIENTS} clients with two shards of sorted labels each, batches of 10, learning "
        f"rate 0.1; rounds to accuracy {TARGET:g}, medians of 5 seeds"
    )
    tolerance = (
        "rounds with E = 5 at most 0.7 of those with E = 1; rounds with C = 0.5 at most 0.8 of those with C = 0.1; "
        "less is gained from E = 5 to 20 than from 1 to 5"
    )

    def check(self, say: Say) -> Verdict:
        """Count the rounds for each number of local passes and clients."""
        rounds = {pair: self._rounds(*pair, say) for pair in product(EPOCHS, PARTICIPANTS)}
        rows = []
        for clients in PARTICIPANTS:
            one, five, twenty = (rounds[epochs, clients] for epochs in EPOCHS)
            what = f"{clients} of {CLIENTS} clients: rounds with E = 1, 5, 20"
            holds = twenty < math.inf and five <= 0.7 * one and one / five > five / twenty
            rows.append(ClaimRow(what, "falling, most at first", f"{one:.0f}, {five:.0f}, {twenty:.0f}", holds))
        for epochs in EPOCHS:
            few, many = (rounds[epochs, clients] for clients in PARTICIPANTS)
            what, holds = f"E = {epochs}: rounds with C = 0.1, 0.5", many < math.inf and many <= 0.8 * few
            rows.append(ClaimRow(what, "ratio <= 0.8", f"{few:.0f}, {many:.0f}", holds))
        return Verdict(tuple(rows))

    def _rounds(self, epochs: int, clients: int, say: Say) -> float:
        each = epochs * STEPS_OF_EPOCH * clients
        ends = [
            trained(f"federated({clients}, epochs={epochs})", 0.0, seed, ROUNDS * each, target=TARGET)
            for seed in range(self.seeds)
        ]
        return medians(ends, f"E = {epochs}, {clients} clients", say).steps / each
