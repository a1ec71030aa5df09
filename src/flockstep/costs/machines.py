"""The parts of a cluster's description: groups of machines, links, and rates. Each part refuses invalid values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flockstep.collectives import costs
from flockstep.errors import ConfigurationError
from flockstep.simulation.fair import FairLink
from flockstep.simulation.network import Link

Reach = Literal["node", "inside", "between"]
DAY = 86400.0
"""Number of seconds in a day."""
MOST = 1_000_000
"""Largest number of machines, or of workers, in a cluster."""
SLOWEST, FASTEST = 1e-9, 1e9
"""Smallest (SLOWEST) and largest (FASTEST) allowed speed of a machine, relative to the speed for which the
description's `compute` holds.
"""

KeyPath = tuple[str | int, ...]
"""Keys and indices that lead to a value of a description, such as ("links", 0, "between")."""


class WrongValue(ConfigurationError):
    """Error: a cluster's description has an invalid value. `path` locates the value, so that a reader of the
    description can name its key.
    """

    def __init__(self, message: str, *path: str | int):
        super().__init__(message)
        self.path: KeyPath = path


@dataclass(frozen=True)
class MachineGroup:
    """A group of identical machines in a cluster."""

    name: str
    count: int = 1
    """Number of machines in the group."""
    workers: int = 1
    """Number of worker processes on each machine."""
    speed: float = 1.0
    """Speed of each machine relative to the speed for which the description's `compute` holds; 2 is twice as fast."""
    cores: int | None = None
    """Number of cores of each machine that the machine's workers share; None for one core per worker."""
    memory: float | None = None
    """Memory of each machine in bytes; None if unknown."""
    failures: float = 0.0
    """Number of failures of one machine per second."""
    restart: float = 0.0
    """Seconds from a failure until the machine rejoins."""
    comes_and_goes: bool = False
    """Whether the group's workers may join and leave at any time, like volunteers' machines or spot instances."""

    def __post_init__(self) -> None:
        for key in ("count", "workers", "cores"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise WrongValue(f"{key} must be >= 1, got {value}; leave it out for the default", key)
            if value is not None and value > MOST:
                raise WrongValue(
                    f"{key} must be <= {MOST}, got {shown(value)}; describe only a part of the cluster", key
                )
        if self.size > MOST:
            raise WrongValue(
                f"count × workers must be <= {MOST}, got {self.size}; describe only a part of the cluster", "count"
            )
        for key in ("speed", "memory"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise WrongValue(f"{key} must be > 0 and finite, got {value:g}; leave it out for the default", key)
        if not SLOWEST <= self.speed <= FASTEST:
            raise WrongValue(
                f"speed must be >= {SLOWEST:g} and <= {FASTEST:g}, got {self.speed:g}; 1 is the speed for which "
                "compute holds",
                "speed",
            )
        for key in ("failures", "restart"):
            value = getattr(self, key)
            if not 0 <= value < math.inf:
                raise WrongValue(f"{key} must be >= 0 and finite, got {value:g}; leave it out for 0", key)

    @property
    def size(self) -> int:
        """Number of workers on all machines of the group."""
        return self.count * self.workers


@dataclass(frozen=True)
class ClusterLink:
    """A link within each machine of some groups (`node`), among all machines of some groups (`inside`), or between two
    tiers (`between`).
    """

    reach: Reach
    groups: tuple[str, ...]
    bandwidth: float
    """Bandwidth of a network card in each direction, in bytes per second."""
    latency: float = 0.0
    """Seconds that a message within a machine or tier takes in addition to the time for its bytes.

    Between tiers, the seconds are added to the latencies within both tiers.
    """
    fair: bool = False
    """Whether messages that pass the link at the same time share its bandwidth, as over TCP, instead of waiting in
    turn.
    """

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise WrongValue(
                f"bandwidth must be > 0 and finite, got {self.bandwidth:g} bytes per second; write '1gbit'", "bandwidth"
            )
        if not 0 <= self.latency < math.inf:
            raise WrongValue(f"latency must be >= 0 and finite, got {self.latency:g} s; write '50us'", "latency")
        if len(set(self.groups)) != len(self.groups):
            raise WrongValue(
                f"{self.reach} must name each group only once, got {listed(self.groups)}; remove the duplicate",
                self.reach,
            )
        if self.reach == "between" and len(self.groups) != 2:
            raise WrongValue(
                f"between must name two groups, got {listed(self.groups)}; write one link for every pair of groups",
                "between",
            )
        if not self.groups:
            raise WrongValue(f"{self.reach} must name at least one group, got none; leave the link out", self.reach)

    @property
    def cost(self) -> costs.LinkModel:
        """Return the link in the form in which closed-form costs are computed."""
        return costs.LinkModel(self.latency, 1 / self.bandwidth)

    @property
    def network(self) -> Link:
        """Return the link as a link of the network model for virtual time, on which messages pass one after the
        other.
        """
        return Link(self.bandwidth, self.latency)

    @property
    def alone(self) -> Link | FairLink:
        """Return the network model for virtual time of a cluster in which this link is the only kind of link between
        machines.
        """
        return FairLink(self.bandwidth, self.latency) if self.fair else self.network


@dataclass(frozen=True)
class Rates:
    """Throughput of one worker's codecs and optimizers, in elements per second, by expression of the codec or
    optimizer.
    """

    encode: Mapping[str, float] = field(default_factory=dict)
    decode: Mapping[str, float] = field(default_factory=dict)
    """Elements decoded per second, including their addition to another array."""
    optimizer: Mapping[str, float] = field(default_factory=dict)


def shown(value: object) -> str:
    """Return a value as text for an error message, shortened to 200 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of very many digits; too many brackets
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Return the names as one text, separated by commas; "none" if there are no names."""
    return ", ".join(names) or "none"
