"""Claim: with stragglers, partial work is better than dropping it."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.digit_clients import CLIENTS, medians, trained

PARTICIPANTS, PERIOD, ROUNDS, LIMIT = 10, 20, 40, 25
SLOW = [f"slows({rank}, 5)" for rank in range(0, CLIENTS, 2)]


@dataclass(frozen=True)
class PartialWork(Claim):
    """Claim: where half of the clients are slow, FedProx with their partial work ends better than FedAvg that drops
    them.
    """

    seeds: int = 5
    statement = "Where half of the clients are five times as slow, counting their partial work beats dropping it"
    source = "Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith 2020, section 5.2 and figure 1"
    setting = (
        f"digits on a perceptron, {CLIENTS} clients with two shards of sorted labels each, {PARTICIPANTS} in a round "
        f"of {PERIOD} steps of a second, for a slow half of five; rounds of at most {LIMIT} s; medians of 5 seeds"
    )
    tolerance = "final accuracy with partial work and mu = 0.1 at least 5 points above that with dropped changes"

    def check(self, say: Say) -> Verdict:
        """Train both ways for as long."""
        dropped = self._final(f"deadline={LIMIT}", say)
        partial = self._final(f"seconds={LIMIT - 5}, drift=prox(mu=0.1)", say)
        shown = f"{dropped:.1f}, {partial:.1f}"
        return Verdict(
            (ClaimRow("accuracy in %, dropped, partial work", "apart by >= 5", shown, partial >= dropped + 5),)
        )

    def _final(self, arguments: str, say: Say) -> float:
        steps, strategy = ROUNDS * PARTICIPANTS * PERIOD // 2, f"federated({PARTICIPANTS}, {PERIOD}, {arguments})"
        ends = [trained(strategy, 0.0, seed, steps, target=2.0, faults=SLOW) for seed in range(self.seeds)]
        return medians(ends, strategy, say).final
