"""Uniform sampling: every client is chosen equally often."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flockstep.strategies.client_samplings.base import Clients, ClientSampling, once


@dataclass(frozen=True)
class Uniform(ClientSampling):
    """Uniform sampling without replacement (McMahan et al. 2017, algorithm 1): every set of clients is equally
    likely.
    """

    def choose(self, random: np.random.Generator, clients: Clients, count: int) -> dict[int, float]:
        idle = clients.idle()
        return once(random.choice(idle, min(count, len(idle)), replace=False))
