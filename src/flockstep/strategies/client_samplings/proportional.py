"""Proportional sampling: a client is chosen in proportion to its number of samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flockstep.strategies.client_samplings.base import Clients, ClientSampling, counts


@dataclass(frozen=True)
class Proportional(ClientSampling):
    """Sampling with replacement in proportion to the clients' numbers of samples (Li et al. 2020, section 3.2, scheme
    I).

    A client that is drawn twice counts twice. The equally weighted mean of the changes is then an unbiased estimate of
    the mean over all samples.
    """

    by_size: ClassVar[bool] = True

    def choose(self, random: np.random.Generator, clients: Clients, count: int) -> dict[int, float]:
        idle = clients.idle()
        sizes = clients.sizes(idle)
        return dict(counts(random.choice(idle, count, p=sizes / sizes.sum()))) if sizes.any() else {}
