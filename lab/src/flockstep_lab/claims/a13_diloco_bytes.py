"""Claim: DiLoCo communicates 500 times less than synchronous training."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.testing.strategies import run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict

WORKERS = 2
STEPS = 1000


@dataclass(frozen=True)
class DilocoBytes(Claim):
    """Claim: DiLoCo sends every 500 steps as many bytes as synchronous training sends in every step."""

    statement = "DiLoCo with H = 500 communicates 500 times less than synchronous data parallelism"
    source = "Douillard et al. 2023, abstract and table 2"
    setting = f"softmax regression, {WORKERS} workers, {STEPS} steps each, a ring in virtual time"
    tolerance = "bytes and messages of all-reduce are exactly H times the bytes and messages of DiLoCo"
    quick = True

    def check(self, say: Say) -> Verdict:
        every = _sent("all_reduce", say)
        rows = []
        for strategy, period in (("diloco", 500), ("local_sgd(100, outer_optimizer=nesterov)", 100)):
            some = _sent(strategy, say)
            for what, more, less in zip(("bytes", "messages"), every, some, strict=True):
                rows.append(ClaimRow(f"{what}, all-reduce ÷ {strategy}", period, more / less, more == period * less))
        return Verdict(tuple(rows))


def _sent(strategy: str, say: Say) -> tuple[int, int]:
    """Payload bytes and messages sent by all workers."""
    say(strategy)
    totals = run_strategy(strategy, WORKERS, STEPS, compute="constant(1)", network="ideal").totals.values()
    return sum(node.sent_bytes for node in totals), sum(node.messages_sent for node in totals)
