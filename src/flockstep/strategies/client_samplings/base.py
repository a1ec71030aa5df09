"""The interface of a client sampling, and what a server knows of its clients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.expression import Component


@dataclass(frozen=True)
class ClientReport:
    """What a client's last change told: its round, the mean loss of its local steps, and the seconds that it took."""

    round: int
    loss: float
    seconds: float


@dataclass
class Clients:
    """What a server knows of its clients; clients that have left are in none of these."""

    samples: dict[int, int] = field(default_factory=dict)
    """Client → number of its training samples."""
    total: int = 0
    """Number of training samples of all clients."""
    busy: dict[int, float] = field(default_factory=dict)
    """Client with a task → time at which the task was sent."""
    reports: dict[int, ClientReport] = field(default_factory=dict)
    """Client → its last report; only clients that have taken part."""
    counted: dict[int, int] = field(default_factory=dict)
    """Client → last round in which its change was used; only such clients."""

    def add(self, rank: int, samples: int) -> None:
        """Add a client that has introduced itself."""
        self.samples[rank] = samples
        self.total += samples

    def heard(self, rank: int, number: int, loss: float, now: float) -> None:
        """Note that a client has ended its task."""
        self.reports[rank] = ClientReport(number, loss, now - self.busy.pop(rank))

    def remove(self, rank: int) -> None:
        """Forget a client that has left."""
        self.total -= self.samples.pop(rank, 0)
        for known in (self.busy, self.reports, self.counted):
            known.pop(rank, None)

    def idle(self) -> npt.NDArray[np.int64]:
        """Return the ranks of the clients without a task, in ascending order."""
        known = np.fromiter(self.samples, np.int64, len(self.samples))
        known.sort()
        return known[~np.isin(known, list(self.busy))] if self.busy else known

    def sizes(self, ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the numbers of training samples of clients."""
        return np.fromiter(map(self.samples.__getitem__, ranks.tolist()), np.float64, len(ranks))


class ClientSampling(Component):
    """The interface of a client sampling, which chooses the clients that take part in a round of `federated`."""

    noun: ClassVar[str] = "client_sampling"
    by_size: ClassVar[bool] = False
    """Whether clients with more samples are chosen more often, so that changes count alike."""

    varies: ClassVar[bool] = False
    """Whether the number of participants is random, and may be 0."""

    @abstractmethod
    def choose(self, random: np.random.Generator, clients: Clients, count: int) -> dict[int, float]:
        """Return the clients of a round, of those without a task: client → how often its change counts.

        The counts add up to `count`, or to less if fewer clients have no task.
        """


def once(ranks: Any) -> dict[int, float]:
    """Return the mapping of a round in which each of these clients counts once."""
    return dict.fromkeys(map(int, ranks), 1.0)


def counts(ranks: npt.NDArray[np.int64]) -> Mapping[int, float]:
    """Return how often each client was drawn."""
    chosen, often = np.unique(ranks, return_counts=True)
    return dict(zip(chosen.tolist(), often.astype(float).tolist(), strict=True))
