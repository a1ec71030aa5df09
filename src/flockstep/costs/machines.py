"""The parts of a cluster's description: machines that are alike, links, and rates. Each refuses what cannot be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flockstep.collectives import costs
from flockstep.errors import ConfigurationError
from flockstep.simulation.fair import FairLink
from flockstep.simulation.network import Link, Network

Path = tuple[str | int, ...]
Reach = Literal["node", "inside", "between"]
DAY = 86400.0
"""Seconds."""
MOST = 1_000_000
"""Machines, or workers, of a cluster."""
SLOWEST, FASTEST = 1e-9, 1e9
"""Of machines, compared with the description's `compute`."""


class WrongValue(ConfigurationError):
    """A value of a description; `path` leads to it, so that a reader can say on which line it stands."""

    def __init__(self, message: str, *path: str | int):
        super().__init__(message)
        self.path: Path = path


@dataclass(frozen=True)
class Group:
    """Machines that are alike."""

    name: str
    count: int = 1
    """Machines."""
    workers: int = 1
    """Worker processes on each."""
    speed: float = 1.0
    """2 computes twice as fast as the description's `compute` says."""
    cores: int | None = None
    """Cores of each machine that its workers share; None: as many as they use."""
    memory: float | None = None
    """Bytes of each machine; None: not known."""
    failures: float = 0.0
    """Failures of a machine per second."""
    restart: float = 0.0
    """Seconds from a failure until the machine takes part again."""
    comes_and_goes: bool = False
    """Whether its workers may join and leave at any time, as those of volunteers or spot instances."""

    def __post_init__(self) -> None:
        for key in ("count", "workers", "cores"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise WrongValue(f"{key} must be >= 1, got {value}; leave it out for the usual", key)
            if value is not None and value > MOST:
                raise WrongValue(f"{key} must be <= {MOST}, got {shown(value)}; describe a part of the cluster", key)
        if self.size > MOST:
            raise WrongValue(
                f"count × workers must be <= {MOST}, got {self.size}; describe a part of the cluster", "count"
            )
        for key in ("speed", "memory"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise WrongValue(f"{key} must be > 0 and finite, got {value:g}; leave it out for the usual", key)
        if not SLOWEST <= self.speed <= FASTEST:
            raise WrongValue(
                f"speed must be >= {SLOWEST:g} and <= {FASTEST:g}, got {self.speed:g}; 1 is that of compute", "speed"
            )
        for key in ("failures", "restart"):
            value = getattr(self, key)
            if not 0 <= value < math.inf:
                raise WrongValue(f"{key} must be >= 0 and finite, got {value:g}; leave it out for none", key)

    @property
    def size(self) -> int:
        """Workers on all its machines."""
        return self.count * self.workers


@dataclass(frozen=True)
class Wire:
    """A link: in each machine of some groups (node), among all machines of some groups (inside), or between two."""

    reach: Reach
    groups: tuple[str, ...]
    bandwidth: float
    """Bytes per second that a card takes in each direction."""
    latency: float = 0.0
    """Seconds; what a message inside a machine or a tier takes beside its bytes, or one between tiers on top of it."""
    fair: bool = False
    """Whether messages that pass it at once go on together, as over TCP, instead of in turn."""

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            raise WrongValue(
                f"bandwidth must be > 0 and finite, got {self.bandwidth:g} bytes per second; write '1gbit'", "bandwidth"
            )
        if not 0 <= self.latency < math.inf:
            raise WrongValue(f"latency must be >= 0 and finite, got {self.latency:g} s; write '50us'", "latency")
        if len(set(self.groups)) != len(self.groups):
            raise WrongValue(f"{self.reach} must name each group once, got {listed(self.groups)}", self.reach)
        if self.reach == "between" and len(self.groups) != 2:
            raise WrongValue(
                f"between must name two groups, got {listed(self.groups)}; write a link for every pair", "between"
            )
        if not self.groups:
            raise WrongValue(f"{self.reach} must name a group, got none; leave the link out", self.reach)

    @property
    def cost(self) -> costs.Link:
        """The same for the closed forms."""
        return costs.Link(self.latency, 1 / self.bandwidth)

    @property
    def network(self) -> Link:
        """The same for virtual time, messages in turn."""
        return Link(self.bandwidth, self.latency)

    @property
    def alone(self) -> Network:
        """The same for virtual time, where it is the only kind of link."""
        return FairLink(self.bandwidth, self.latency) if self.fair else self.network


@dataclass(frozen=True)
class Rates:
    """Elements per second that one worker gets through, by the expression of what does it."""

    encode: Mapping[str, float] = field(default_factory=dict)
    decode: Mapping[str, float] = field(default_factory=dict)
    """Including the addition to what is there."""
    optimizer: Mapping[str, float] = field(default_factory=dict)


def shown(value: object) -> str:
    """A value as it is written, not all of it where that is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of very many digits; too many brackets
        return f"a very long {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Names with commas between them."""
    return ", ".join(names) or "none"
