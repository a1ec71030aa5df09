"""Claim: a table states, for each family of methods, what one failed or slow worker does to the other workers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from flockstep.errors import PeerLost
from flockstep.records.events import StepEvent
from flockstep.strategies.base import Strategy
from flockstep.testing.strategies import equal_bits
from flockstep_lab import failures
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, same
from flockstep_lab.claims.delay_share import VICTIM, ThroughputLoss, alone, lateness, measured, predicted
from flockstep_lab.claims.failure_table import FAMILIES, Expectation, Family
from flockstep_lab.claims.real_faults import killed, narrowed, why_not

WORKERS = 8
NARROW = "bandwidth of one link divided by 40"
SLOWED = {
    ("central", "synchronous"): ("ps(bsp)", "all_reduce"),
    ("decentral", "synchronous"): ("dpsgd", "local_sgd(period=4)"),
    ("central", "asynchronous"): ("asgd", "ps(softsync(1))"),
    ("decentral", "asynchronous"): ("easgd(period=4)", "adpsgd", "gossip"),
}
"""(optimization, scheduling) in the taxonomy → strategies that are run with one slow worker."""
FAULTS = {"one worker 4× slower": "slows({}, 4)", NARROW: "narrows({}, 40)"}
ASKS = {"adpsgd": 2}
"""Strategy → rank of the worker whose link is narrowed, for strategies in which some workers never wait for their
link.
"""
NEVER_WAITS = ("gossip",)
"""Strategies in which no worker waits for messages: a narrow link slows no worker, but makes messages older."""
SERVED = ("ps(bsp)", "asgd", "easgd(period=10)")
KILLED = {"all_reduce": False, "ps(bsp)": False, "asgd": True, "gossip": True}
"""Strategy → whether the other workers continue after one worker was killed."""
SHAPED = {"all_reduce": True, "asgd": False}
"""Strategy → whether one narrow link slows all workers down."""


@dataclass(frozen=True)
class Resilience(Claim):
    """Claim: synchronous and asynchronous strategies react to failures and slow workers as the taxonomy says."""

    statement = (
        "Each family of methods reacts to a dead worker, a lost message and a slow worker as the table of failures "
        "states, and its replicas are equal when the table states it; one slow worker or link slows all n workers "
        "down as much as the affected worker if training is synchronous, and costs at most 1/n of that throughput "
        "if training is asynchronous"
    )
    source = (
        "the papers of the methods, family by family; Langer et al. 2020, table 2, columns RSOI (resilience: low "
        "for synchronous, high for asynchronous methods)"
    )
    setting = (
        "virtual time: 4 workers, 24 steps, one fault per run; 8 workers for the effect of one slow worker or "
        "narrow link on the other workers; real processes: SIGKILL, and a link between network namespaces whose "
        "bandwidth is reduced"
    )
    tolerance = (
        "every row of the failure table holds; share of one worker's loss of throughput that all workers lose: "
        "within 0.06 of 1, or at most 1/n + 0.06; shares in virtual time and in the plan within 0.15 of each other; "
        "with a real narrow link >= 0.7 or <= 0.5"
    )

    def check(self, say: Say) -> Verdict:
        """Check every row of the failure table, then slow workers and narrow links in virtual time, then faults of
        real processes.
        """
        rows: list[ClaimRow] = []
        short: dict[str, int] = {}
        for family in FAMILIES:
            say(family.name)
            for row, why in cells(family):
                rows.append(row)
                if not row.holds:
                    short[why] = short.get(why, 0) + 1
        held = sum(row.holds for row in rows)
        figures = {"rows of the failure table": float(len(rows)), "rows that hold": float(held)}
        rows += beyond_cells()
        say("testing slow workers and narrow links")
        rows += shares()
        rows += foreseen()
        say("real processes")
        rows += real(say)
        reasons = [f"{held} of {figures['rows of the failure table']:.0f} rows of the failure table hold"]
        reasons += [
            f"{count} not{': ' if why.startswith('unexpected') else ', because '}{why}" for why, count in short.items()
        ]
        reasons += [f"not tested on a real link: {why}" for why in (why_not(),) if why]
        figures[("adpsgd, narrow link of a worker that only answers: share of throughput that all workers lose")] = (
            measured("adpsgd", WORKERS, FAULTS[NARROW].format(VICTIM)).everyone
        )
        return Verdict(tuple(rows), "; ".join(reasons), figures)


def cells(family: Family) -> Iterator[tuple[ClaimRow, str]]:
    """Yield the rows of a family's example strategies, one per kind of fault, with the reason if a row does not
    hold.
    """
    for example in family.examples:
        strategy = Strategy.parse(example)
        yield _cell(f"{example}, replicas equal", family.equal, failures.replicas_equal(strategy))
        yield _cell(f"{example}, dead worker", family.dead, failures.dead_worker(strategy))
        lost = failures.lost_message(strategy)
        if isinstance(lost, str):
            yield _cell(f"{example}, lost message", family.lost[0], lost)
        else:
            for kind, word in lost.items():
                cell = next(cell for cell in family.lost if cell.kind in (kind, ""))
                yield _cell(f"{example}, lost {kind}", cell, word)
        yield _cell(f"{example}, slow worker", family.slow, failures.slow_worker(strategy))


def _cell(what: str, cell: Expectation, word: str) -> tuple[ClaimRow, str]:
    return ClaimRow(what, cell.expected, word, cell.holds(word)), cell.why(word)


def beyond_cells() -> list[ClaimRow]:
    """Return rows on faults that the failure table leaves out: agreement of the survivors, dead servers,
    repeatability.
    """
    dies = f"dies(1, {failures.DEATH}, noticed={failures.UNNOTICED})"
    rows = []
    for text in ("all_reduce", "scatter_reduce"):
        run = failures.observe(text, faults=[dies])
        last = [run.params[rank] for rank in (0, 2, 3)]
        named = isinstance(run.failure, PeerLost) and equal_bits(*last)
        ours = "named, survivors equal" if named else "survivors differ"
        rows.append(ClaimRow(f"{text}, dead worker: no state is lost", "named, survivors equal", ours, named))
    run = failures.observe("broadcast", faults=[dies])
    agree = all(np.allclose(run.params[0], run.params[rank], rtol=1e-5, atol=1e-6) for rank in (2, 3))
    rows.append(ClaimRow("broadcast, dead worker: survivors agree", "yes", "yes" if agree else "no", agree))
    run = failures.observe("broadcast", faults=["drops(1, 2, 5)"])
    apart = not np.allclose(run.params[1], run.params[2], rtol=1e-5, atol=1e-6)
    rows.append(ClaimRow("broadcast, lost message: replicas agree", "no", "no" if apart else "yes", apart))
    for text in SERVED:
        run = failures.observe(text, faults=[f"dies(-1, {failures.DEATH})"])
        named = isinstance(run.failure, PeerLost) and "server 0 died" in str(run.failure)
        rows.append(
            ClaimRow(f"{text}, dead server", failures.ENDS, failures.ENDS if named else str(run.failure), named)
        )
    every = [example for family in FAMILIES for example in family.examples]
    alike = sum(_repeats(example, [dies, "slows(2, 3)"]) for example in every)
    rows.append(same("runs with faults that repeat bit for bit", len(every), alike))
    return rows


def _repeats(example: str, faults: list[str]) -> bool:
    one, two = (failures.observe(example, faults=faults) for _ in range(2))
    return all(equal_bits(one.params[a], two.params[a]) for a in one.params) and one.of(StepEvent) == two.of(StepEvent)


def shares() -> Iterator[ClaimRow]:
    """Yield the rows on how much one worker's slowdown slows all workers, and on the throughput after the fault has
    ended.
    """
    yield from shares_of_losses()
    for text in ("all_reduce", "asgd"):
        before, during, after = alone(text, WORKERS)
        back = abs(after / before - 1) <= 0.02 and during < 0.95 * before
        ours = f"{during / before:.2f}, then {after / before:.2f}"
        yield ClaimRow(
            f"{text}: throughput while a link is narrow and after it recovers, relative to the throughput before",
            "below 1, then 1.00",
            ours,
            back,
        )


def shares_of_losses() -> Iterator[ClaimRow]:
    """Yield one row per strategy and fault: the share of the slow worker's loss of throughput that all workers lose."""
    for (where, how), strategies in SLOWED.items():
        wanted, said = (1.0, "1") if how == "synchronous" else (1 / WORKERS, f"≤ {1 / WORKERS}")
        for text, (name, fault) in itertools.product(strategies, FAULTS.items()):
            if text in NEVER_WAITS and name == NARROW:
                yield waits_for_nobody(text)
                continue
            victim = ASKS.get(text, VICTIM) if name == NARROW else VICTIM
            loss = measured(text, WORKERS, fault.format(victim), victim)
            what = f"{text} ({where}, {how}), {name}: share of the worker's loss of throughput that all workers lose"
            yield _share(what, said, loss, wanted - 0.06 if how == "synchronous" else -math.inf, wanted + 0.06)


def _share(what: str, said: str, loss: ThroughputLoss, least: float, most: float) -> ClaimRow:
    if loss.exercised:
        return ClaimRow(what, said, loss.share, least <= loss.share <= most)
    ours = f"not tested: even the affected worker loses only {loss.victim:.1%} of its throughput"
    return ClaimRow(what, said, ours, False)


def waits_for_nobody(text: str) -> ClaimRow:
    """Return the row of a strategy without waiting: a narrow link makes messages older, but slows no worker down."""
    fault = FAULTS[NARROW].format(VICTIM)
    loss, (before, after) = measured(text, WORKERS, fault), lateness(text, WORKERS, fault)
    ours = f"{max(loss.victim, loss.everyone):.1%}, staleness {before:.1f} → {after:.1f}"
    tested = after >= before + 1
    return ClaimRow(
        f"{text}, {NARROW}: largest loss of throughput of any worker",
        "larger staleness, but no loss",
        ours if tested else f"not tested: {ours}",
        tested and max(abs(loss.victim), abs(loss.everyone)) <= 0.01,
    )


def foreseen() -> Iterator[ClaimRow]:
    """Yield rows that compare the share of random delays that all workers lose: predicted by a plan, and measured in
    virtual time.
    """
    for text in ("ps(bsp)", "all_reduce", "ps(backup(1))", "asgd", "gossip"):
        plan, ours = predicted(text, WORKERS)
        yield ClaimRow(
            f"{text}: share of random delays that all workers lose, predicted by a plan",
            plan,
            ours,
            abs(plan - ours) <= 0.15,
        )


def real(say: Say) -> Iterator[ClaimRow]:
    """Yield the rows on real processes of which one worker is killed, or has its link narrowed."""
    for text, survives in KILLED.items():
        say(f"SIGKILL of a worker of {text}")
        wanted = failures.GOES_ON if survives else failures.ENDS
        ours = killed(text)
        yield same(f"{text}, real processes: SIGKILL of a worker", wanted, ours)
    for text, everyone in SHAPED.items():
        what, said = (
            f"{text}, one real link narrowed to a tenth: share of its worker's loss that all workers lose",
            "≥ 0.7" if everyone else "≤ 0.5",
        )
        if why := why_not():
            yield ClaimRow(what, said, f"not tested: {why}", False)
            continue
        say(f"one link narrows during a run of {text}")
        yield _share(what, said, narrowed(text), *((0.7, math.inf) if everyone else (-math.inf, 0.5)))
