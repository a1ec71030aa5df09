"""Claim: FedBuff reaches a target sooner than synchronous rounds where clients' times vary."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.digit_clients import CLIENTS, medians, trained

PARTICIPANTS, PERIOD, TARGET, ROUNDS = 10, 10, 0.9, 80
COMPUTE = "lognormal(1, 1.5)"


@dataclass(frozen=True)
class BufferedClients(Claim):
    """Claim: asynchronous clients with a buffer need less time than rounds that wait for all participants."""

    seeds: int = 5
    statement = (
        "With lognormal step times FedBuff reaches a target in less time than FedAvg with as many clients at a time"
    )
    source = "Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek & Huba 2022, figure 1 and table 1 (3.3 times as fast)"
    setting = (
        f"digits on a perceptron, {CLIENTS} clients with two shards of sorted labels each, {PARTICIPANTS} at a time, "
        f"{PERIOD} steps, steps of {COMPUTE} virtual seconds; seconds to accuracy {TARGET:g}, medians of 5 seeds"
    )
    tolerance = "FedAvg's seconds at least 1.5 times those of FedBuff with buffers of 5 and of 10"

    def check(self, say: Say) -> Verdict:
        """Measure the virtual seconds of each."""
        rounds = self._seconds(f"federated({PARTICIPANTS}, {PERIOD})", say)
        rows = []
        for buffer in (5, 10):
            ratio = rounds / self._seconds(f"fedbuff({PARTICIPANTS}, {PERIOD}, buffer={buffer})", say)
            rows.append(ClaimRow(f"buffer of {buffer}: times as fast", ">= 1.5", round(ratio, 1), ratio >= 1.5))
        return Verdict(tuple(rows))

    def _seconds(self, strategy: str, say: Say) -> float:
        steps = ROUNDS * PARTICIPANTS * PERIOD
        ends = [trained(strategy, 0.0, seed, steps, target=TARGET, compute=COMPUTE) for seed in range(self.seeds)]
        return medians(ends, strategy, say).seconds
