"""Power-of-choice: of some candidates, those with the highest loss are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flockstep.errors import require
from flockstep.strategies.client_samplings.base import Clients, ClientSampling, once


@dataclass(frozen=True)
class PowerOfChoice(ClientSampling):
    """Power-of-choice (Cho, Wang & Joshi 2020, section 3; their variant rpow-d): the candidates with the highest loss.

    `candidates` (d, as a multiple of the participants) clients are drawn without replacement in proportion to their
    samples. Those with the highest loss in their last report are chosen; clients that have not taken part come first.
    More candidates speed up training and add bias towards clients with a high loss.
    """

    candidates: float = 2.0

    def __post_init__(self) -> None:
        require(1 <= self.candidates < math.inf, "candidates", ">= 1 times the participants", self.candidates, "use 2")

    def choose(self, random: np.random.Generator, clients: Clients, count: int) -> dict[int, float]:
        idle = clients.idle()
        sizes = clients.sizes(idle)
        several = min(math.ceil(self.candidates * count), int(np.count_nonzero(sizes)))
        drawn = random.choice(idle, several, replace=False, p=sizes / sizes.sum()) if several else idle[:0]
        loss = [clients.reports[rank].loss if rank in clients.reports else math.inf for rank in drawn.tolist()]
        return once(drawn[np.argsort(np.negative(loss), kind="stable")[:count]])
