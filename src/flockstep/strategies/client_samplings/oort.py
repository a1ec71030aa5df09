"""Oort: clients with much to learn that answer soon are chosen more often."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from flockstep.errors import require
from flockstep.strategies.client_samplings.base import ClientReport, Clients, ClientSampling, once


@dataclass(frozen=True)
class Oort(ClientSampling):
    """Oort's utility (Lai et al. 2021, section 4): samples times loss, less for clients slower than `preferred`
    seconds.

    The share `explore` of the participants are clients that have not taken part yet. The others are drawn in proportion
    to their utility n_k l_k (T / t_k)^penalty, the last factor only if t_k > T = `preferred`; l_k is the mean loss of
    the last local steps, in place of the root mean square of the samples' losses.
    """

    preferred: float = math.inf
    penalty: float = 2.0
    explore: float = 0.1

    def __post_init__(self) -> None:
        require(self.preferred > 0, "preferred", "> 0 seconds", self.preferred, "leave it out for no preference")
        require(0 <= self.penalty < math.inf, "penalty", ">= 0 and finite", self.penalty, "2 is the paper's alpha")
        require(0 <= self.explore <= 1, "explore", "in [0, 1]", self.explore, "0.1 is usual")

    def choose(self, random: np.random.Generator, clients: Clients, count: int) -> dict[int, float]:
        idle = clients.idle()
        known = np.isin(idle, list(clients.reports))
        old, new = idle[known], idle[~known]
        fresh = min(len(new), max(math.ceil(self.explore * count), count - len(old)))
        worth = np.array([self.utility(clients.samples[rank], clients.reports[rank]) for rank in old.tolist()])
        rest = min(count - fresh, int(np.count_nonzero(worth)))
        best = random.choice(old, rest, replace=False, p=worth / worth.sum()) if rest else old[:0]
        return once([*best, *random.choice(new, fresh, replace=False)])

    def utility(self, samples: int, report: ClientReport) -> float:
        """Return the utility of a client."""
        slow = report.seconds > self.preferred
        return samples * report.loss * ((self.preferred / report.seconds) ** self.penalty if slow else 1.0)
