"""Claim: gradient coding recovers the exact gradient for every set of at most s stragglers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np

from flockstep.strategies.gradient_coding import code, decoder
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict


@dataclass(frozen=True)
class GradientCodingExact(Claim):
    """Claim: gradient coding gives the exact gradient, whichever s of n workers are stragglers."""

    statement = "Gradient coding gives the exact gradient for every set of s missing workers among n"
    source = "Tandon, Lei, Dimakis & Karampatziakis 2017, theorem 1 and algorithm 2"
    setting = "every set of n - s surviving workers, for (n, s) = (5, 1), (6, 2), (10, 3), with both coding schemes"
    tolerance = "cyclic coding: largest error of a decoded coefficient <= 1e-9; fractional coding: exactly 0"
    quick = True

    def check(self, say: Say) -> Verdict:
        """For every set of n - s workers, decode the sum of all gradients, and measure the largest error of a
        coefficient.
        """
        rows = [
            self._row("cyclic", 5, 1, 1e-9),
            self._row("cyclic", 6, 2, 1e-9),
            self._row("cyclic", 10, 3, 1e-9),
            self._row("fractional", 6, 1, 0.0),
            self._row("fractional", 9, 2, 0.0),
        ]
        return Verdict(tuple(rows))

    def _row(self, scheme: Literal["cyclic", "fractional"], n: int, s: int, bound: float) -> ClaimRow:
        b = code(scheme, n, s)
        sets = list(combinations(range(n), n - s))
        worst = max(float(np.abs(np.asarray(decoder(scheme, n, s, live)) @ b[list(live)] - 1).max()) for live in sets)
        return ClaimRow(
            f"largest error of a coefficient, {scheme}, n={n}, s={s}, {len(sets)} sets of survivors",
            f"<= {bound:g}",
            worst,
            worst <= bound,
        )
