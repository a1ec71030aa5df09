"""What goes wrong in virtual time: nodes that die, messages that get lost, workers and links that slow down."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from flockstep.errors import ConfigurationError
from flockstep.expression import Component
from flockstep.messages import Address, node_name
from flockstep.nodes import Cluster
from flockstep.simulation import units


class Fault(Component):
    """Something that goes wrong. Nodes are numbered as in the record: workers from 0 up, servers from -1 down."""

    noun: ClassVar[str] = "fault"

    @abstractmethod
    def check(self, cluster: Cluster) -> None:
        """Raise `ConfigurationError` unless the nodes that it speaks of take part."""


@dataclass(frozen=True)
class Dies(Fault):
    """A node dies at second `at`; the others hear of it `noticed` seconds later.

    What it has sent by then arrives; what is sent to it goes nowhere.
    """

    node: int
    at: str | float
    noticed: str | float = 0.0

    def __post_init__(self) -> None:
        units.duration(self.at, "at")
        units.duration(self.noticed, "noticed")

    def check(self, cluster: Cluster) -> None:
        """The node takes part."""
        _takes_part(self.node, cluster)


@dataclass(frozen=True)
class Drops(Fault):
    """The `nth` message with a payload from one node to another never arrives; 1 is the first."""

    source: int
    to: int
    nth: int = 1

    def __post_init__(self) -> None:
        if self.nth < 1:
            raise ConfigurationError(f"nth must be >= 1, got {self.nth}; 1 is the first message")

    def check(self, cluster: Cluster) -> None:
        """Both nodes take part."""
        _takes_part(self.source, cluster)
        _takes_part(self.to, cluster)


@dataclass(frozen=True)
class Slows(Fault):
    """A worker is slow: gradients begun in [at, until) seconds take `factor` times as long; 0: for ever."""

    worker: int
    factor: float
    at: str | float = 0.0
    until: str | float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ConfigurationError(f"factor must be > 0 and finite, got {self.factor}; 2 means twice as slow")
        units.duration(self.at, "at")
        units.duration(self.until, "until")

    def check(self, cluster: Cluster) -> None:
        """It is a worker that takes part."""
        if self.worker < 0:
            raise ConfigurationError(f"slows needs a worker's rank, got {self.worker}; servers compute no gradients")
        _takes_part(self.worker, cluster)

    def stretch(self, rank: int, t: float) -> float:
        """By what a gradient of that worker, begun at second t, is longer."""
        until = units.duration(self.until) or math.inf
        return self.factor if rank == self.worker and units.duration(self.at) <= t < until else 1.0


@dataclass(frozen=True)
class Narrows(Fault):
    """A node's own link has a `factor`-th of its bandwidth, both ways, in [at, until) seconds; 0: for ever.

    A message that is being sent when it begins, or ends, goes on at the pace at which it began.
    """

    node: int
    factor: float
    at: str | float = 0.0
    until: str | float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ConfigurationError(f"factor must be > 0 and finite, got {self.factor}; 10 leaves a tenth")
        at, until = units.duration(self.at, "at"), units.duration(self.until, "until")
        if until and until <= at:
            raise ConfigurationError(f"until must be after at, got {self.until} and {self.at}; 0 means for ever")

    def check(self, cluster: Cluster) -> None:
        """The node takes part."""
        _takes_part(self.node, cluster)

    def strikes(self, t: float) -> bool:
        """Whether the link is narrow at second t."""
        until = units.duration(self.until) or math.inf
        return units.duration(self.at) <= t < until


def _takes_part(node: Address, cluster: Cluster) -> None:
    if node not in cluster.addresses:
        workers, servers = cluster.workers, cluster.servers
        raise ConfigurationError(
            f"{node_name(node)} does not take part: there are {workers} workers (0 to {workers - 1}) and {servers} "
            f"servers{f' (-1 to -{servers})' if servers else ''}; name one of these"
        )
