"""One-peer exponential graph: at each step, every worker sends to one other worker, whose distance doubles from step to
step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.topologies.base import require_workers
from flockstep.topologies.directed_exponential import DirectedExponentialGraph, hops


@dataclass(frozen=True)
class OnePeerExponentialGraph(DirectedExponentialGraph):
    """At step t, worker i sends half of its model to worker i + 2^(t mod L) mod n, with L = ⌊log₂(n-1)⌋ + 1 (Assran et
    al. 2019).

    The distances are 1, 2, 4 and so on below n, as in the paper's section 4 and its code. Every W is doubly stochastic;
    if n is a power of two, the product of the matrices of a period is the exact average.
    """

    def schedule(self, n: int) -> tuple[npt.NDArray[np.float64], ...]:
        """Return the mixing matrices (I + shift by 2ᵏ) / 2 for each k."""
        require_workers(n)
        own = np.eye(n)
        return tuple((own + np.roll(own, hop, axis=0)) / 2 for hop in hops(n)) or (own,)

    def weights(self, n: int) -> npt.NDArray[np.float64]:
        mean: npt.NDArray[np.float64] = np.mean(self.schedule(n), axis=0)
        return mean
