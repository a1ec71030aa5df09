"""Claim: in a ring all-reduce of N nodes, each node sends 2(N-1)/N times the bytes of the array."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.arrays.schema import slices
from flockstep.records.events import NodeEvent
from flockstep.testing.strategies import bowl_job, run_strategy
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, near, same
from flockstep_lab.claims.real_run import events_of

NODES = range(2, 9)
ELEMENTS = 1009
"""Number of float32 parameters; a prime, so that no number of nodes divides it."""
STEPS = 5
BANDWIDTH = 125e6
"""Bandwidth of the virtual links in bytes per second."""
LARGE = 200_003
"""Number of float64 parameters in the runs that are timed."""
REAL = 3


@dataclass(frozen=True)
class RingBytes(Claim):
    """Claim: in a ring all-reduce of K elements, each of N nodes sends 2(N-1)K/N elements."""

    statement = "A ring all-reduce of K elements sends 2(N-1)K/N elements per node and 2(N-1)K elements in total"
    source = "Patarasuk & Yuan 2009, section 3; Sergeev & Del Balso 2018, section 4"
    setting = (
        f"quadratic, K = {ELEMENTS}, {STEPS} steps: N = 2 to 8 in virtual time, N = {REAL} on real processes, with "
        f"the payload counted as handed to the sockets; times on virtual links of 1 Gbit/s, K = {LARGE}"
    )
    tolerance = (
        "each node sends 2K elements minus its two chunks in 2(N-1) messages, all nodes together 2(N-1)K elements, "
        "all exact; slope of the time over 2(N-1)K/N within 15 %"
    )

    def check(self, say: Say) -> Verdict:
        """Count the elements sent in virtual time and on real processes, and fit the virtual seconds to 2(N-1)K/N."""
        rows = []
        for n in NODES:
            say(f"{n} nodes, virtual")
            run = run_strategy("all_reduce", n, STEPS, job=bowl_job(dimension=ELEMENTS, dtype="float32"))
            rows += self._counted(n, [run.totals[rank] for rank in range(n)], "virtual")
        say(f"{REAL} nodes, real")
        rows += self._counted(REAL, self._real(REAL), "processes")
        slope = self._slope(say)
        rows.append(near("slope of the virtual time over 2(N-1)K/N, relative to 1 / bandwidth", 1.0, slope, 0.15))
        note = (
            "the times are measured on the virtual network only, because the bandwidth of this machine's loopback "
            "is not limited"
        )
        return Verdict(tuple(rows), note)

    def _counted(self, n: int, totals: list[NodeEvent], where: str) -> list[ClaimRow]:
        sizes = [part.stop - part.start for part in slices(ELEMENTS, n)]
        expected = [2 * ELEMENTS - sizes[(rank + 1) % n] - sizes[(rank + 2) % n] for rank in range(n)]
        sent = [node.sent_bytes / (4 * STEPS) for node in totals]
        messages = {node.messages_sent / STEPS for node in totals}
        per_node = ", ".join(map(str, expected))
        total = 2 * (n - 1) * ELEMENTS
        return [
            ClaimRow(
                f"elements sent per node, N={n}, {where}", per_node, ", ".join(f"{s:g}" for s in sent), sent == expected
            ),
            same(f"elements sent in total, N={n}, {where}", total, sum(sent)),
            ClaimRow(f"messages sent per node, N={n}, {where}", 2 * (n - 1), max(messages), messages == {2 * (n - 1)}),
        ]

    def _real(self, n: int) -> list[NodeEvent]:
        events = events_of(f"quadratic(dimension={ELEMENTS})", "all_reduce", n, STEPS)
        return sorted((event for event in events if isinstance(event, NodeEvent)), key=lambda event: event.node)

    def _slope(self, say: Say) -> float:
        shares, seconds = [], []
        for n in NODES:
            say(f"{n} nodes, timed")
            network = f"link(bandwidth={BANDWIDTH}, latency=0)"
            job = bowl_job(dimension=LARGE)
            run = run_strategy("all_reduce", n, 2, job=job, compute="constant(0.01)", network=network)
            shares.append(2 * (n - 1) / n * LARGE * 8 / BANDWIDTH)
            seconds.append(run.seconds / 2 - 0.01)
        return float(np.polyfit(shares, seconds, 1)[0])
