"""Claim: stale synchronous parallel has BSP and asynchronous training as its limits, and keeps its staleness bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flockstep.messages import Message
from flockstep.testing.strategies import Sent, SimulatedRun, equal_bits, run_strategy, small_job
from flockstep_lab.claims.base import Claim, Say, Verdict, bounded, same

BOUNDS = (0, 1, 2, 3, 5, 10)
LAWS = ("constant(0.05)", "normal(0.05, cv=0.3)", "exponential(0.05)", "lognormal(0.05, sigma=1.5)")
WORKERS = 6
NEVER = 10**6


@dataclass(frozen=True)
class SspLimits(Claim):
    """Claim: ssp(0) equals bulk synchronous training, and without a bound SSP equals asynchronous training.

    The paper adds every update once (`weight=sum`); with updates divided by the number of workers, `ssp(0)` is
    `bsp`.
    """

    seeds: int = 5
    steps: int = 60
    statement = (
        "Stale synchronous parallel with s = 0 equals bulk synchronous training; without a bound, with every update "
        "added in full, it equals asynchronous training; and no worker is ever more than s clocks ahead of the "
        "slowest worker"
    )
    source = "Ho et al. 2013, section 3; Langer, He, Rahayu & Xue 2020, section 3.3.4"
    setting = (
        "softmax regression, 6 workers with momentum, 4 distributions of gradient times, 5 seeds, links of 1 Gbit/s"
    )
    tolerance = "parameters and times equal bit for bit; the gap between workers never exceeds s, and reaches s"

    def check(self, say: Say) -> Verdict:
        """Compare ssp(0) with bsp, and SSP without a bound with asynchronous training, under every distribution of
        compute times. Then measure by how many steps workers are apart.
        """
        cases = [(law, seed) for law in LAWS for seed in range(self.seeds)]
        none = sum(_same(self._run("ssp(0)", *case), self._run("bsp", *case)) for case in cases)
        unbounded = f"ssp({NEVER}, weight=sum)"
        endless = sum(_same(self._run(unbounded, *case), self._run("asynchronous", *case)) for case in cases)
        say(
            f"{none} of {len(cases)} runs with s = 0 equal bsp, and {endless} runs without a bound equal "
            "asynchronous runs"
        )
        rows = [
            same("runs with s = 0 that equal runs of bsp", len(cases), none),
            same("runs without a bound that equal asynchronous runs", len(cases), endless),
        ]
        for s in BOUNDS:
            gap = max(_gap(self._run(f"ssp({s})", *case)) for case in cases)
            rows.append(same(f"s={s}: largest gap", s, gap))
        free = max(_gap(self._run("asynchronous", *case)) for case in cases)
        rows.append(
            bounded(
                "largest gap between workers, in steps, in asynchronous runs (for comparison)", f"> {max(BOUNDS)}", free
            )
        )
        say(
            f"largest gap between workers, in steps: {[row.ours for row in rows[2:-1]]} with bounds, {free} without "
            "a bound"
        )
        return Verdict(tuple(rows))

    def _run(self, consistency: str, law: str, seed: int) -> SimulatedRun:
        job = small_job("sgd(lr=0.05, momentum=0.5)")
        return run_strategy(f"ps(consistency={consistency})", WORKERS, self.steps, job=job, compute=law, seed=seed)


def _same(one: SimulatedRun, other: SimulatedRun) -> bool:
    """Whether two runs end with equal parameters on all nodes and have the same events at the same times."""
    parameters = all(equal_bits(one.params[node], other.params[node]) for node in one.nodes)
    return parameters and one.events == other.events


def _gap(run: SimulatedRun) -> int:
    """Largest number of clocks by which a worker that begins a gradient is ahead of the slowest, from the messages
    alone.
    """
    clocks = dict.fromkeys(range(WORKERS), 0)
    widest = 0
    for to, message in _exchanges(run.simulation.log):
        if message.source >= 0:
            clocks[message.source] += 1
        else:
            widest = max(widest, clocks[to] - min(clocks.values()))
    return widest


def _exchanges(log: Iterable[object]) -> list[tuple[int, Message]]:
    """Pushed gradients and returned parameters, in order."""
    sent = [entry for entry in log if isinstance(entry, Sent)]
    return [(entry.to, entry.message) for entry in sent if entry.message.tag == "push"]
