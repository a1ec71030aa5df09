"""Poisson sampling: every client takes part with the same probability, independently of the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flockstep.strategies.client_samplings.base import Clients, ClientSampling, once


@dataclass(frozen=True)
class Poisson(ClientSampling):
    """Poisson sampling (McMahan et al. 2018, algorithm 1): a client takes part with probability q = participants / n.

    The number of participants varies, and may be 0. The privacy of `privacy=dp` is amplified by it.
    """

    varies: ClassVar[bool] = True

    def choose(self, random: np.random.Generator, clients: Clients, count: int) -> dict[int, float]:
        idle = clients.idle()
        return once(idle[random.random(len(idle)) < count / max(len(clients.samples), 1)])
