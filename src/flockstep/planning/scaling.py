"""How strategies scale with workers, and where bandwidth, model or stragglers would change which is best."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.planning.criteria import need, worth
from flockstep.planning.prospect import Moved, Pace, Prospect, faster
from flockstep.planning.task import Site
from flockstep.simulation.compute import ComputeModel, SharedCores, SlowSpells
from flockstep.simulation.law import mean_of

WORKERS = tuple(1 << power for power in range(11))
"""1, 2, 4, … 1,024."""
GRAPHS = ("graph", "closed ring")
"""Places whose mixing has to be worked out for every number of workers."""
GRAPH = 1024
"""Workers up to which it is."""
PAYS = 1.1
"""How many times as much twice the workers have to be worth, to pay."""
SCAN = 6
"""Points on either side of what is, between which a change of the best is looked for."""
HALVINGS = 6
"""Of the interval in which it lies."""
REACH = 1000.0
"""How far bandwidth and model size are varied, up and down."""
FACTOR, LENGTH = 5.0, 10
"""Of the slow spells that are varied: how many times as slow, for how many steps."""
RARE, USUAL = 1e-4, 0.3
"""Probabilities between which stragglers are varied."""


@dataclass(frozen=True)
class Contender:
    """A strategy that can be asked about other circumstances; `pace` None: one worker."""

    found: Prospect
    need: float
    """How many of its samples do the work of one of plain training."""
    pace: Pace | None
    site: Site = field(repr=False)
    """Where the plan is made."""

    @property
    def name(self) -> str:
        """Its expression."""
        return self.found.name

    def rate(self, site: Site, workers: int, law: ComputeModel | None = None) -> float:
        """Samples a second; 0 where it cannot run."""
        if self.pace is None:
            return self.found.samples_per_second
        cost = self._step(self.pace, site, workers, law)
        return 0.0 if cost is None else cost.samples_per_second

    def _step(self, pace: Pace, site: Site, workers: int, law: ComputeModel | None) -> Moved | None:
        """What a step costs; None where it cannot run."""
        cell = pace.strategy.cell
        if workers > GRAPH and cell is not None and cell.topology in GRAPHS:
            return None
        try:
            return pace.at(site, workers, law)
        except ConfigurationError:
            return None

    def worth(self, site: Site, workers: int, law: ComputeModel | None = None, slower: float = 1.0) -> float:
        """Samples a second in terms of plain training's, where all but computing takes `slower` times as long."""
        if self.pace is None:
            return worth(self.found.samples_per_second, self.need)
        cost = self._step(self.pace, site, workers, law)
        if cost is None or cost.samples_per_second <= 0:
            return 0.0
        rate = cost.samples_per_second
        if slower != 1:
            rate /= waiting(min(1.0, self._computing(site, workers, law) / cost.seconds), slower)
        return worth(rate, need(self._moved(cost, site, workers), site))

    def _moved(self, cost: Moved, site: Site, workers: int) -> Prospect:
        """The prediction as it is there: with other workers, bytes and lateness are those of its pace."""
        moved = replace(self.found, workers=workers, seconds=cost.seconds)
        if workers != self.found.workers:
            return replace(moved, sent=cost.sent, staleness=cost.staleness)
        return replace(moved, sent=self.found.sent * site.task.nbytes / self.site.task.nbytes)

    def _computing(self, site: Site, workers: int, law: ComputeModel | None) -> float:
        """Seconds of a step that a worker computes, from what they are where the plan is made."""
        here, there = self.site.compute(self.found.workers), site.compute(workers) if law is None else law
        ratio = mean_of(there) / (mean_of(here) or 1.0)
        return self.found.utilisation * self.found.seconds * ratio


def waiting(share: float, slower: float) -> float:
    """How many times as long a step takes, `share` of it computing, where the rest takes `slower` times as long."""
    return share + slower * (1 - share)


Rivals = Sequence[Contender]
Ask = Callable[[float, Contender], float]
"""What a contender is worth at a value of what is varied."""


@dataclass(frozen=True)
class Curve:
    """Samples a second over numbers of workers, and what they are worth."""

    name: str
    workers: tuple[int, ...]
    samples_per_second: tuple[float, ...]
    worths: tuple[float, ...]
    """How many times as quickly as one worker it is taken to advance."""
    pays_to: int
    """The most workers that are worth at least a tenth more than half as many; 1 if none."""
    beats_one_from: int | None
    """The fewest workers that are worth more than one worker alone; None if none are."""
    beats_one_to: int | None
    """The most that are; None if none are."""

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Crossover:
    """The nearest place at which another strategy becomes better than the one that is chosen here."""

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
    rates = {workers: rate for workers in sizes if (rate := one.rate(site, workers)) > 0}
    worths = {workers: one.worth(site, workers) / single for workers in rates}
    pays = [many for few, many in itertools.pairwise(worths) if worths[many] >= PAYS * worths[few]]
    beats = [workers for workers, worth in worths.items() if workers > 1 and worth > 1]
    figures = tuple(rates), tuple(rates.values()), tuple(worths.values())
    return Curve(one.name, *figures, max(pays, default=1), min(beats, default=None), max(beats, default=None))


def crossovers(contenders: Rivals, site: Site, workers: int, choice: str, slower: float = 1.0) -> tuple[Crossover, ...]:
    """Where another of them becomes better than `choice`: of bandwidth, model size and stragglers the nearest place.

    One is varied at a time, up and down from what it is; `slower`: as of `Contender.worth`. None where the choice is
    not among them.
    """
    bandwidth, size, law = site.link[1], float(site.task.elements), site.compute(workers)
    chosen = next((one for one in contenders if one.name == choice), None)
    if workers < 2 or chosen is None or not math.isfinite(bandwidth):
        return ()
    here = chosen.worth(site, workers, slower=slower)
    rivals = [one for one in contenders if one is not chosen and one.worth(site, workers, slower=slower) <= here]

    def by_bandwidth(value: float, one: Contender) -> float:
        return one.worth(replace(site, cluster=faster(site.cluster, value / bandwidth)), workers, slower=slower)

    def by_size(value: float, one: Contender) -> float:
        return one.worth(replace(site, task=site.task.scaled(value / size)), workers, slower=slower)

    def by_straggling(value: float, one: Contender) -> float:
        return one.worth(site, workers, _straggling(law, value), slower)

    rare = [math.exp(math.log(RARE) + i * math.log(USUAL / RARE) / SCAN) for i in range(SCAN + 1)]
    found = [
        _leaves("bandwidth", by_bandwidth, chosen, rivals, bandwidth, _from(bandwidth, 1 / REACH)),
        _leaves("bandwidth", by_bandwidth, chosen, rivals, bandwidth, _from(bandwidth, REACH)),
        _leaves("parameters", by_size, chosen, rivals, size, _from(size, max(1 / size, 1 / REACH))),
        _leaves("parameters", by_size, chosen, rivals, size, _from(size, REACH)),
        _leaves("straggling", by_straggling, chosen, rivals, 0.0, rare),
    ]
    return tuple(one for one in found if one is not None)


def _from(here: float, reach: float) -> Iterable[float]:
    """Points from here to so many times that."""
    return [here * reach ** ((i + 1) / SCAN) for i in range(SCAN)]


def best(contenders: Rivals, site: Site, workers: int, law: ComputeModel | None = None, slower: float = 1.0) -> str:
    """The name of the one that is worth most."""
    return max(contenders, key=lambda one: one.worth(site, workers, law, slower)).name


def _straggling(law: ComputeModel, probability: float) -> ComputeModel:
    """The law with slow spells on top: five times as slow for ten steps."""
    if isinstance(law, SharedCores):
        return replace(law, base=SlowSpells(law.base, probability, FACTOR, LENGTH))
    return SlowSpells(law, probability, FACTOR, LENGTH)


def _leaves(
    quantity: str, ask: Ask, chosen: Contender, rivals: Rivals, here: float, points: Iterable[float]
) -> Crossover | None:
    """The first place on the way along `points` where a rival is ahead of the one that is chosen here.

    Between two points only those are compared that are ahead at the second: who is ahead in between alone is missed.
    """
    if here > 0:  # as far as it is known there: of a model that is scaled shapes are not, on which some depend
        least = ask(here, chosen)
        rivals = [one for one in rivals if ask(here, one) <= least] if least > 0 else []
    near = here
    for far in points:
        ahead = _ahead(ask, far, chosen, rivals)
        for _ in range(HALVINGS if ahead and near > 0 else 0):
            middle = math.sqrt(near * far)
            earlier = _ahead(ask, middle, chosen, ahead)
            near, far, ahead = (near, middle, earlier) if earlier else (middle, far, ahead)
        if ahead:
            other = max(ahead, key=lambda one: ask(far, one)).name
            below, above = (chosen.name, other) if far > here else (other, chosen.name)
            return Crossover(quantity, math.sqrt(near * far) if near > 0 else far, here, below, above)
        near = far
    return None


def _ahead(ask: Ask, value: float, chosen: Contender, rivals: Rivals) -> list[Contender]:
    least = ask(value, chosen)
    return [one for one in rivals if ask(value, one) > least]
