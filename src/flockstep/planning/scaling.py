"""How strategies scale with workers, and where bandwidth, model or stragglers would change which is best."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flockstep.costs.cluster import ClusterShape
from flockstep.errors import ConfigurationError
from flockstep.planning.criteria import worth
from flockstep.planning.prospect import FACTOR, LENGTH, Pace, Prospect
from flockstep.planning.task import Site
from flockstep.simulation.compute import ComputeModel, SharedCores, SlowSpells

WORKERS = tuple(1 << power for power in range(11))
"""1, 2, 4, … 1,024."""
GRAPHS = ("graph", "closed ring")
"""Places whose mixing has to be worked out for every number of workers."""
GRAPH = 1024
"""Workers up to which it is."""
PAYS = 1.1
"""How many times as many samples a second twice the workers have to give, to pay."""
SCAN = 7
"""Points between which a change of the best is looked for."""
HALVINGS = 6
"""Of the interval in which it lies."""
REACH = 1000.0
"""How far bandwidth and model size are varied, up and down."""
RARE, USUAL = 1e-4, 0.3
"""Probabilities between which stragglers are varied."""


@dataclass(frozen=True)
class Contender:
    """A strategy that can be asked about other circumstances; `pace` None: one worker."""

    found: Prospect
    need: float
    """How many of its samples do the work of one of plain training."""
    pace: Pace | None

    @property
    def name(self) -> str:
        """Its expression."""
        return self.found.name

    def rate(self, site: Site, workers: int, law: ComputeModel | None = None) -> float:
        """Samples a second; 0 where it cannot run."""
        if self.pace is None:
            return self.found.samples_per_second
        if workers > GRAPH and self.pace.strategy.cell is not None and self.pace.strategy.cell.topology in GRAPHS:
            return 0.0
        try:
            return self.pace.samples_per_second(site, workers, law)
        except ConfigurationError:
            return 0.0


Rivals = Sequence[Contender]


@dataclass(frozen=True)
class Curve:
    """Samples a second over numbers of workers."""

    name: str
    workers: tuple[int, ...]
    samples_per_second: tuple[float, ...]
    pays_to: int
    """The most workers that gave at least a tenth more samples a second than half as many; 1 if none."""
    beats_one_from: int | None
    """The fewest workers that get through more than one worker alone; None if none do."""

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Crossover:
    """Where another strategy becomes the best."""

    quantity: str
    """bandwidth (bytes per second), parameters, or straggling: the probability that a slow spell begins at a step."""
    value: float
    here: float
    """What it is now."""
    below: str
    """The best where it is smaller."""
    above: str

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


def curve(one: Contender, site: Site, single: float, sizes: Sequence[int] = WORKERS) -> Curve:
    """How a contender scales, against `single` samples a second; sizes at which it cannot run are left out."""
    known = [(workers, rate) for workers in sizes if (rate := one.rate(site, workers)) > 0]
    pays = [many for (_, before), (many, after) in itertools.pairwise(known) if after >= PAYS * before]
    beats = [workers for workers, rate in known if workers > 1 and rate > single]
    workers, rates = tuple(workers for workers, _ in known), tuple(rate for _, rate in known)
    return Curve(one.name, workers, rates, max(pays, default=1), min(beats, default=None))


def crossovers(contenders: Sequence[Contender], site: Site, workers: int) -> tuple[Crossover, ...]:
    """Every place at which the best changes, of bandwidth, model size and stragglers, one varied at a time."""
    if workers < 2 or len(contenders) < 2:
        return ()
    bandwidth, size = site.link[1], float(site.task.elements)
    law = site.compute(workers)

    def by_bandwidth(value: float, among: Rivals = contenders) -> str:
        return best(among, replace(site, cluster=faster(site.cluster, value / bandwidth)), workers)

    def by_size(value: float, among: Rivals = contenders) -> str:
        return best(among, replace(site, task=site.task.scaled(value / size)), workers)

    def by_straggling(value: float, among: Rivals = contenders) -> str:
        return best(among, site, workers, _straggling(law, value))

    found = _changes("bandwidth", by_bandwidth, contenders, bandwidth, bandwidth / REACH, bandwidth * REACH)
    found += _changes("parameters", by_size, contenders, size, max(1.0, size / REACH), size * REACH)
    found += _changes("straggling", by_straggling, contenders, 0.0, RARE, USUAL)
    return tuple(found)


def best(contenders: Sequence[Contender], site: Site, workers: int, law: ComputeModel | None = None) -> str:
    """The name of the one that is worth most."""
    return max(contenders, key=lambda one: worth(one.rate(site, workers, law), one.need)).name


def faster(cluster: ClusterShape, factor: float) -> ClusterShape:
    """The same cluster with so many times the bandwidth."""
    return replace(cluster, wires=tuple(replace(wire, bandwidth=wire.bandwidth * factor) for wire in cluster.wires))


def _straggling(law: ComputeModel, probability: float) -> ComputeModel:
    """The law with slow spells on top: five times as slow for ten steps."""
    if isinstance(law, SharedCores):
        return replace(law, base=SlowSpells(law.base, probability, FACTOR, LENGTH))
    return SlowSpells(law, probability, FACTOR, LENGTH)


def _changes(
    quantity: str, choose: Callable[..., str], rivals: Rivals, here: float, low: float, high: float
) -> list[Crossover]:
    """Where `choose` says something else, by bisection on a logarithmic scale between points of a scan.

    Between two points only the two that are best there are compared: a third that is best in between is missed.
    """
    points = [math.exp(math.log(low) + i * math.log(high / low) / (SCAN - 1)) for i in range(SCAN)]
    names = [choose(point) for point in points]
    found = []
    for (lower, before), (upper, after) in itertools.pairwise(zip(points, names, strict=True)):
        if before == after:
            continue
        two = [one for one in rivals if one.name in (before, after)]
        for _ in range(HALVINGS):
            middle = math.sqrt(lower * upper)
            if choose(middle, two) == before:
                lower = middle
            else:
                upper = middle
        found.append(Crossover(quantity, math.sqrt(lower * upper), here, before, after))
    return found
