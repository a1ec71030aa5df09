"""Rounds of synchronous servers: everyone pushes, the servers answer everyone, everyone goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flockstep.costs.rounds import Times, Workers, bias, counted, served, settled
from flockstep.costs.setting import Setting


@dataclass(frozen=True)
class Round:
    """What a round is, in the mean."""

    seconds: float
    computing: float
    """Seconds that a worker computes in it."""
    pushing: float
    """Share of the workers that push in it."""


@dataclass
class Collecting:
    """A recurrence over rounds. `pushed` and `pulled` are the payloads of one shard."""

    setting: Setting
    pushed: float
    pulled: float
    shards: int = 1
    needed: int = 0
    """Gradients that make a round; 0: everyone's."""
    gradients: int = 1
    """That a worker computes in a round."""
    by_rank: bool = False
    """Servers answer in order of rank, not of arrival."""
    serving: float = 0.0
    """Seconds that a server takes after the last gradient."""
    extra: float = 0.0
    """Seconds that a worker takes besides computing."""
    ahead: bool = False
    """Workers push before their first gradient, and go on with the others when it and the answer are there."""
    _free: Times = field(init=False)
    _longest: list[float] = field(default_factory=list)
    _computing: list[float] = field(default_factory=list)
    _pushing: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = np.zeros(self.shards)
        self.needed = self.needed or self.setting.workers

    def round(self) -> Round:
        """The mean of many."""
        found = settled(self.setting, self._turn, self.gradients)
        if not self.ahead:
            found += bias(self.setting, self.needed, self.gradients, self._longest)
        return Round(found, counted(self._computing), counted(self._pushing))

    def _turn(self, workers: Workers) -> None:
        done = workers.compute(1 if self.ahead else self.gradients)
        self._longest.append(float(np.partition(done - workers.at, self.needed - 1)[self.needed - 1]))
        answered = self._answered((workers.at if self.ahead else done) + self.extra)
        after = np.maximum(done, answered) if self.ahead else answered
        self._computing.append(float((np.minimum(done, after) - workers.at).mean()))
        self._pushing.append(float((done <= after).mean()))
        workers.at = after
        if self.ahead:
            workers.at = workers.compute(self.gradients - 1)

    def _answered(self, leaves: Times) -> Times:
        """When each worker has every shard's answer, where they push at these times."""
        n, latency = self.setting.workers, self.setting.latency
        up, down = self.setting.busy(self.pushed), self.setting.busy(self.pulled)
        order, places = np.argsort(leaves, kind="stable"), np.arange(n)
        heads = np.empty((n, self.shards))  # by place in the order of answers
        for j in range(self.shards):
            arrived = served(leaves[order] + j * up + latency, up)
            begins = max(float(arrived[self.needed - 1]) + self.serving, float(self._free[j]))
            self._free[j] = begins + n * down
            heads[:, j] = begins + places * down + latency
        answered = np.empty(n)
        answered[places if self.by_rank else order] = served(np.sort(heads, axis=1), down)[:, -1]
        return answered
