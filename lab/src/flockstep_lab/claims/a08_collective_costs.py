"""Claim: formulas give the times of four all-reduce algorithms, and the array sizes at which one algorithm becomes
faster than another.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from flockstep.collectives import costs
from flockstep.collectives.base import Collective
from flockstep.collectives.costs import LinkModel
from flockstep.messages import HEADER_BYTES
from flockstep.nodes import Worker
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict
from flockstep_lab.claims.programs_alone import run_once

LATENCY, PER_BYTE = 50e-6, 8e-10
NETWORK = f"link(bandwidth={1 / PER_BYTE!r}, latency={LATENCY!r})"
CHARGED = LinkModel(LATENCY, PER_BYTE, HEADER_BYTES)
"""Cost model of the links in `NETWORK`, including the virtual network's message headers, which the published formulas
ignore.
"""
FORMULAS: dict[str, Callable[[int, float, LinkModel], float]] = {
    "binomial_tree": costs.tree,
    "recursive_doubling": costs.butterfly,
    "ring": costs.pipeline,
    "rabenseifner": costs.halving_doubling,
}
SIZES = (512, 4096, 65536, 1 << 20)
"""Sizes of the reduced arrays, in bytes."""
CROSSOVERS = {4: 250, 8: 150, 16: 118, 64: 93}
"""Number of workers → published array size, in kilobytes, above which the butterfly (recursive doubling) is no longer
fastest.
"""
STEP = 1.04
"""Ratio of successive array sizes in the search for the size at which another algorithm becomes faster."""


@dataclass(frozen=True)
class CollectiveCosts(Claim):
    """Claim: tree, butterfly, pipeline, and reduce-scatter followed by gather take the times of their published
    formulas.
    """

    statement = (
        "All-reduces by tree, butterfly, pipeline, and reduce-scatter with gather take 2 lg P (L + mG), lg P (L + "
        "mG), 2(P-1)(L + mG/P) and 2 L lg P + 2mG(P-1)/P, and none takes less than L lg P + 2mG(P-1)/P; the "
        "butterfly is best up to 250, 150, 118 and 93 kB for P = 4, 8, 16 and 64"
    )
    source = "Hoefler's slides for Ben-Nun & Hoefler 2019, on collectives; the crossovers follow from the formulas"
    setting = (
        "virtual links of 10 Gbit/s and 50 µs, P = 2 to 64, arrays of 512 B to 1 MiB; the messages have headers of "
        "64 B, which are included in the formulas"
    )
    tolerance = "virtual times within 1e-9 of the formulas; crossovers within one step of 4 % in array size"
    quick = True

    def check(self, say: Say) -> Verdict:
        """Time all collectives, then search for the array sizes at which the order of two collectives changes."""
        rows = []
        for n in (2, 4, 8, 16, 64):
            say(f"{n} workers")
            rows += [self._timed(name, n) for name in FORMULAS]
        for n, kilobytes in CROSSOVERS.items():
            say(f"crossover of {n} workers")
            rows.append(self._crossover(n, kilobytes))
        rows += self._inequalities()
        note = (
            "the times are checked in virtual time only: the real loopback of one host has neither a constant "
            "latency nor a separate link for each rank"
        )
        return Verdict(tuple(rows), note)

    def _timed(self, name: str, n: int) -> ClaimRow:
        errors, above = [], True
        for nbytes in SIZES:
            expected = FORMULAS[name](n, nbytes, CHARGED)
            got = seconds(name, n, nbytes)
            errors.append(abs(got / expected - 1))
            above &= got >= costs.lower_bound(n, nbytes, CHARGED) * (1 - 1e-12)
        what = (
            f"{name}, P={n}: largest relative distance of the time from the formula; the time is never below the bound"
        )
        return ClaimRow(what, 0.0, max(errors), max(errors) <= 1e-9 and above)

    def _crossover(self, n: int, kilobytes: int) -> ClaimRow:
        """The first size at which the butterfly is slower, on a ladder from well below to well above the published
        crossover.
        """
        ladder = (round(kilobytes * 500 * STEP**i / (8 * n)) * 8 * n for i in itertools.count())
        found = next(m for m in ladder if seconds("recursive_doubling", n, m) > seconds("rabenseifner", n, m)) / 1e3
        return ClaimRow(
            f"array size in kB from which the butterfly is slower than reduce-scatter and gather, P={n}",
            kilobytes,
            found,
            kilobytes / STEP <= found <= kilobytes * STEP,
        )

    def _inequalities(self) -> list[ClaimRow]:
        link = LinkModel(LATENCY, PER_BYTE)
        cases = [(1 << k, m) for k in range(1, 11) for m in np.geomspace(1, 1e9, 40)]
        butterfly = all(costs.tree(n, m, link) == 2 * costs.butterfly(n, m, link) for n, m in cases)
        slack = 1 + 1e-12
        pipeline = all(costs.halving_doubling(n, m, link) <= costs.pipeline(n, m, link) * slack for n, m in cases)
        two = all(costs.butterfly(2, m, link) <= costs.halving_doubling(2, m, link) * slack for _, m in cases)
        return [
            ClaimRow(
                "the tree takes twice as long as the butterfly, P = 2 to 1024",
                "always",
                "always" if butterfly else "not always",
                butterfly,
            ),
            ClaimRow(
                "reduce-scatter and gather take at most the time of the pipeline",
                "always",
                "always" if pipeline else "not always",
                pipeline,
            ),
            ClaimRow(
                "with P = 2, the butterfly is never slower than reduce-scatter and gather",
                "always",
                "always" if two else "not always",
                two,
            ),
        ]


@functools.cache
def seconds(name: str, n: int, nbytes: int) -> float:
    """Return the virtual seconds of one all-reduce of `nbytes` bytes of float64 among n workers."""
    collective = Collective.parse(name)

    async def program(me: Worker) -> None:
        await collective.all_reduce(me, np.ones(nbytes // 8))

    return run_once(program, n, NETWORK).seconds
