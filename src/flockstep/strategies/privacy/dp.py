"""Differential privacy of clients: clipped changes and Gaussian noise."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

from flockstep.arrays.kernels import name_of
from flockstep.arrays.namespace import cast, namespace, to_device_of
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, MissingDependency, require
from flockstep.nodes import Server
from flockstep.strategies.privacy.base import Privacy

MOST_ROUNDS = 1 << 20


@dataclass(frozen=True)
class DifferentialPrivacy(Privacy):
    """DP-FedAvg (McMahan, Ramage, Talwar & Zhang 2018, algorithm 1): what a client has changed is hidden.

    A client's change is scaled down to the norm `clip` (C). Participants are drawn by sampling=poisson at the rate q of
    n clients; the model moves by (sum of changes + noise) / (q n), with Gaussian noise of the standard deviation
    `noise` C (z C) in each element. The run is (epsilon, `delta`)-differentially private as to adding or removing one
    client, towards whoever sees the models, but neither single changes, the record nor the run's seed, from which the
    noise is drawn: the server is trusted, and the seed must be a secret number. Epsilon is computed by dp-accounting's
    Renyi accountant, and written to the record as the scalar "epsilon" after each round. With `epsilon`, the run ends
    before the round that would exceed it. `delta` is n^-1.1 unless given.
    """

    bounded: ClassVar[bool] = True

    clip: float = 1.0
    noise: float = 1.0
    epsilon: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        require(0 < self.clip < math.inf, "clip", "> 0 and finite", self.clip, "take the median norm of changes")
        require(0 < self.noise < math.inf, "noise", "> 0 and finite", self.noise, "1 is usual")
        if self.epsilon is not None:
            require(0 < self.epsilon < math.inf, "epsilon", "> 0 and finite", self.epsilon, "leave it out for no limit")
        if self.delta is not None:
            require(0 < self.delta < 1, "delta", "in (0, 1)", self.delta, "leave it out for clients^-1.1")

    def limited(self, change: FlatArray) -> FlatArray:
        norm = float(namespace(change).linalg.norm(change))
        return change if norm <= self.clip else change * (self.clip / norm)

    def released(self, me: Server, mean: FlatArray, weight: float) -> FlatArray:
        noise = me.random.normal(0.0, self.noise * self.clip * weight, len(mean))
        return mean + cast(to_device_of(noise, mean), name_of(mean))

    def rounds(self, clients: int, participants: int) -> float:
        if self.epsilon is None:
            self.spent(1, clients, participants)  # a missing accountant is told before the run
            return math.inf
        if self._exceeded(1, clients, participants):
            raise ConfigurationError(
                f"epsilon={self.epsilon:g} cannot be had: one round with noise={self.noise:g} and {participants} of "
                f"{clients} clients costs {self.spent(1, clients, participants):.3g}; raise noise, or choose fewer"
            )
        low, high = 1, 2
        while high < MOST_ROUNDS and not self._exceeded(high, clients, participants):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._exceeded(middle, clients, participants) else (middle, high)
        return low

    def _exceeded(self, rounds: int, clients: int, participants: int) -> bool:
        assert self.epsilon is not None
        return self.spent(rounds, clients, participants) > self.epsilon

    def spent(self, rounds: int, clients: int, participants: int) -> float:
        delta = clients**-1.1 if self.delta is None else self.delta
        return _epsilon(rounds, participants / clients, self.noise, min(delta, 0.5))


@functools.lru_cache(maxsize=4096)
def _epsilon(rounds: int, rate: float, noise: float, delta: float) -> float:
    dp = _accounting()
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), rounds)
    return float(accountant.get_epsilon(delta))


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise MissingDependency.of("dp-accounting", "private", "privacy=dp") from None
    return dp_accounting
