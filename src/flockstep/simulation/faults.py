"""Faults in virtual time: nodes die, messages are lost, workers and links slow down."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from flockstep.errors import ConfigurationError, require
from flockstep.expression import Component
from flockstep.messages import Address, node_name
from flockstep.nodes import Cluster
from flockstep.simulation import units


class Fault(Component):
    """A fault to inject into a run. Workers have the numbers 0, 1, …, and servers the numbers -1, -2, …."""

    noun: ClassVar[str] = "fault"
    real: ClassVar[bool] = False
    """Whether the fault can also be injected into real runs of a declared job."""
    split: ClassVar[bool] = False
    """Whether the fault can also be injected into runs of a split model."""

    @abstractmethod
    def check(self, cluster: Cluster) -> None:
        """Raise `ConfigurationError` if a node that this fault names does not exist in the cluster."""


@dataclass(frozen=True)
class Dies(Fault):
    """A node dies at second `at`; the other nodes are notified `noticed` seconds later.

    Messages that the node has sent before still arrive; messages sent to the node are dropped.
    """

    split: ClassVar[bool] = True

    node: int
    at: str | float
    noticed: str | float = 0.0

    def __post_init__(self) -> None:
        units.duration(self.at, "at")
        units.duration(self.noticed, "noticed")

    def check(self, cluster: Cluster) -> None:
        _takes_part(self.node, cluster)


@dataclass(frozen=True)
class Drops(Fault):
    """Message number `nth`, counted from 1, of the messages with an array from one node to another is lost."""

    source: int
    to: int
    nth: int = 1

    def __post_init__(self) -> None:
        require(self.nth >= 1, "nth", ">= 1", self.nth, "use 1 for the first message")

    def check(self, cluster: Cluster) -> None:
        _takes_part(self.source, cluster)
        _takes_part(self.to, cluster)


@dataclass(frozen=True)
class Slows(Fault):
    """A worker is slow: gradients that begin from second `at` to second `until` take `factor` times as long; `until` 0
    means forever.
    """

    split: ClassVar[bool] = True

    worker: int
    factor: float
    at: str | float = 0.0
    until: str | float = 0.0

    def __post_init__(self) -> None:
        require(0 < self.factor < math.inf, "factor", "> 0 and finite", self.factor, "use 2 for twice as slow")
        units.duration(self.at, "at")
        units.duration(self.until, "until")

    def check(self, cluster: Cluster) -> None:
        """Check that the node is a worker of the run."""
        if self.worker < 0:
            raise ConfigurationError(
                f"slows needs a worker's rank, got {self.worker}, because servers compute no gradients; use 0 to "
                f"{cluster.workers - 1}"
            )
        _takes_part(self.worker, cluster)

    def stretch(self, rank: int, t: float) -> float:
        """Return the factor by which the fault lengthens a gradient that worker `rank` begins at second `t`."""
        until = units.duration(self.until) or math.inf
        return self.factor if rank == self.worker and units.duration(self.at) <= t < until else 1.0


@dataclass(frozen=True)
class Narrows(Fault):
    """From second `at` to second `until` (0: forever), a node's own link has 1/`factor` of its bandwidth in both
    directions.

    A message that is in transit when the fault begins or ends is not affected.
    """

    split: ClassVar[bool] = True

    node: int
    factor: float
    at: str | float = 0.0
    until: str | float = 0.0

    def __post_init__(self) -> None:
        require(
            0 < self.factor < math.inf, "factor", "> 0 and finite", self.factor, "10 leaves a tenth of the bandwidth"
        )
        at, until = units.duration(self.at, "at"), units.duration(self.until, "until")
        if until and until <= at:
            raise ConfigurationError(
                f"until must be after at, got {self.until} and {self.at}; use 0 for a fault that does not end"
            )

    def check(self, cluster: Cluster) -> None:
        _takes_part(self.node, cluster)

    def active(self, t: float) -> bool:
        """Return whether the fault reduces the bandwidth at second `t`."""
        until = units.duration(self.until) or math.inf
        return units.duration(self.at) <= t < until


def _takes_part(node: Address, cluster: Cluster) -> None:
    if node not in cluster.processes:
        workers, servers = cluster.workers, len(cluster.processes) - cluster.workers
        raise ConfigurationError(
            f"{node_name(node)} does not exist in this run: there are {workers} workers (0 to {workers - 1}) and "
            f"{servers} servers{f' (-1 to -{servers})' if servers else ''}; name one of these nodes"
        )
