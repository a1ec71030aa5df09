"""Claim: a formula gives the density of sums of sparse vectors, and a published table of speed-ups is consistent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.collectives.sparse import expected_elements
from flockstep.collectives.sparse_phases import summed_by_doubling
from flockstep.collectives.streams import Stream
from flockstep.nodes import Worker
from flockstep_lab.claims.base import Claim, ClaimRow, Say, Verdict, near
from flockstep_lab.claims.programs_alone import run_once

FILL_IN = {(8, 16, 512): 22.43, (16, 1, 100): 14.85, (128, 1, 100): 72.4}
"""(workers, kept elements, bucket size) → published percentage of nonzero elements in the sum of the workers'
vectors.
"""
BUCKETS = 500
SPEED_UPS = {
    "VGG19": (1.55, 3.31, 0.508),
    "AlexNet": (1.30, 1.36, 0.872),
    "MNIST, Piz Daint": (3.65, 4.53, 0.932),
    "MNIST, EC2": (19.12, 22.97, 0.991),
}
"""Row of the published table → (total speed-up, speed-up of communication, share of communication in the step that
both speed-ups imply).
"""


@dataclass(frozen=True)
class SparseFillIn(Claim):
    """Claim: the density of a sum of sparse vectors follows from a formula, and published speed-ups follow Amdahl's
    law.
    """

    statement = (
        "The sum of P vectors with random supports of density d has density 1 - (1-d)^P; SparCML's speed-ups follow "
        "Amdahl's law, with the speed-up of the communication alone in parentheses"
    )
    source = "Renggli et al. 2019 (SparCML), as quoted in the slides for Ben-Nun & Hoefler 2019"
    setting = f"{BUCKETS} buckets with random supports on each of P workers, summed by ssar_doubling"
    tolerance = "density within 1 % of the formula; shares of communication equal to three digits and at most 1"
    quick = True

    def check(self, say: Say) -> Verdict:
        """Compute the density of the sums, and the shares of communication that the published table implies."""
        rows = []
        for (n, kept, bucket), published in FILL_IN.items():
            say(f"{n} workers, {kept} of {bucket}")
            formula = 100 * expected_elements(bucket, kept, n) / bucket
            digits = 1 if published == 72.4 else 2
            rows.append(
                ClaimRow(
                    f"formula, {kept} of {bucket}, P={n}: %", published, formula, round(formula, digits) == published
                )
            )
            ours = 100 * self._density(n, kept, bucket)
            rows.append(near(f"summed, {kept} of {bucket}, P={n}: %", published, ours, 0.01))
        for name, (whole, bracket, published) in SPEED_UPS.items():
            share = (1 - 1 / whole) / (1 - 1 / bracket)
            rows.append(
                ClaimRow(
                    f"{name}: share of communication", published, share, round(share, 3) == published and share <= 1
                )
            )
        return Verdict(
            tuple(rows),
            "the share of communication follows from the two published speed-ups and was not measured; a share of at "
            "most 1 shows only that the speed-up in parentheses in the published table can be that of communication",
        )

    def _density(self, n: int, kept: int, bucket: int) -> float:
        """Share of nonzero elements in the sum of random sparse vectors."""
        sums: list[Stream] = []

        async def program(me: Worker) -> None:
            random = np.random.default_rng([7, me.rank])
            support = random.random((BUCKETS, bucket)).argpartition(kept, axis=1)[:, :kept]
            indices = np.sort((support + bucket * np.arange(BUCKETS)[:, None]).ravel()).astype(np.uint32)
            mine = Stream.of(BUCKETS * bucket, np.ones(len(indices), np.float32), indices)
            total = await summed_by_doubling(me, mine, "float32")
            if me.rank == 0:
                sums.append(total)

        run_once(program, n, "ideal")
        return float(np.count_nonzero(sums[0].dense()) / (BUCKETS * bucket))
