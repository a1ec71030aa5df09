"""Predicts how strategies scale with workers, and at which bandwidth, model size or straggling another strategy becomes
best.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flockstep.errors import ConfigurationError
from flockstep.planning.criteria import effective_rate, preference, relative_samples, repeated
from flockstep.planning.job_profile import Site
from flockstep.planning.step_prediction import Moved, Pace, StepPrediction, faster
from flockstep.simulation.compute import ComputeModel, SharedCores, SlowSpells
from flockstep.simulation.law import mean_of

WORKERS = tuple(1 << power for power in range(11))
"""Numbers of workers for which a scaling curve is predicted: 1, 2, 4, … 1,024."""
GRAPHS = ("graph", "closed ring")
"""Topologies on which the spread of an update over all workers must be computed separately for every number of
workers.
"""
GRAPH = 1024
"""Largest number of workers for which the topologies in `GRAPHS` are computed."""
PAYS = 1.1
"""Smallest factor by which doubling the number of workers must increase the speed to count as worthwhile."""
SCAN = 6
"""Number of points, on each side of the current value of a quantity, at which the best strategy is computed to find a
crossover.
"""
HALVINGS = 6
"""Number of bisections of the interval in which the best strategy changes from one to another."""
REACH = 1000.0
"""Factor by which bandwidth and model size are varied, up and down, in the search for crossovers."""
FACTOR, LENGTH = 5.0, 10
"""FACTOR: slowdown of a worker in a slow spell, when stragglers are varied. LENGTH: number of steps of a slow spell."""
RARE, USUAL = 1e-4, 0.3
"""Smallest (RARE) and largest (USUAL) probability that a slow spell begins at a step, when stragglers are varied."""


@dataclass(frozen=True)
class ScalablePrediction:
    """A strategy's prediction that can be recomputed for other conditions. `pace` is None for one worker."""

    found: StepPrediction
    relative_samples: float
    """Factor by which the strategy needs more samples than one worker for the same accuracy."""
    pace: Pace | None
    site: Site = field(repr=False)
    """The task and the cluster of the plan."""

    @property
    def name(self) -> str:
        """The expression of the strategy."""
        return self.found.name

    def rate(self, site: Site, workers: int, law: ComputeModel | None = None) -> float:
        """Return the samples per second of `workers` workers on `site`; 0 if the strategy cannot run."""
        if self.pace is None:
            return self.found.samples_per_second
        cost = self._step(self.pace, site, workers, law)
        return 0.0 if cost is None else cost.samples_per_second

    def _step(self, pace: Pace, site: Site, workers: int, law: ComputeModel | None) -> Moved | None:
        """Cost of a step; None if the strategy cannot run."""
        cell = pace.strategy.taxonomy_entry
        if workers > GRAPH and cell is not None and cell.topology in GRAPHS:
            return None
        try:
            return pace.at(site, workers, law)
        except ConfigurationError:
            return None

    def effective_rate(
        self,
        site: Site,
        workers: int,
        law: ComputeModel | None = None,
        slower: float = 1.0,
        unbalanced: bool = False,
    ) -> float:
        """Return the effective samples per second of `workers` workers on `site` (samples per second divided by the
        relative number of samples needed), if every part of a step except computing takes `slower` times as long, and
        if the workers have different data (`unbalanced`).
        """
        if self.pace is None:
            return effective_rate(self.found.samples_per_second, self.relative_samples)
        cost = self._step(self.pace, site, workers, law)
        if cost is None or cost.samples_per_second <= 0:
            return 0.0
        rate = cost.samples_per_second
        if slower != 1:
            rate /= waiting(min(1.0, self._computing(site, workers, law) / cost.seconds), slower)
        moved = self._moved(cost, site, workers)
        if unbalanced:
            rate /= repeated(moved, site)
        return effective_rate(rate, relative_samples(moved, site))

    def _moved(self, cost: Moved, site: Site, workers: int) -> StepPrediction:
        """The prediction under other circumstances; with other workers, bytes and staleness are those of the pace."""
        moved = replace(self.found, workers=workers, seconds=cost.seconds, samples_per_second=cost.samples_per_second)
        if workers != self.found.workers:
            return replace(moved, sent_bytes=cost.sent_bytes, staleness=cost.staleness)
        return replace(moved, sent_bytes=self.found.sent_bytes * site.task.nbytes / self.site.task.nbytes)

    def _computing(self, site: Site, workers: int, law: ComputeModel | None) -> float:
        """Seconds of a step that a worker computes, scaled from the plan's site."""
        here, there = self.site.compute(self.found.workers), site.compute(workers) if law is None else law
        ratio = mean_of(there) / (mean_of(here) or 1.0)
        return self.found.utilization * self.found.seconds * ratio


def waiting(share: float, slower: float) -> float:
    """Return the factor by which a step becomes longer if computing, which is `share` of the step, takes as long as
    before and the rest takes `slower` times as long.
    """
    return share + slower * (1 - share)


Ask = Callable[[float, ScalablePrediction], float]
"""Type of functions that return the effective samples per second of a strategy, given the value of the varied quantity
and the strategy's prediction.
"""


@dataclass(frozen=True)
class Curve:
    """The scaling curve of a strategy: samples per second and predicted speed-up for several numbers of workers."""

    name: str
    workers: tuple[int, ...]
    samples_per_second: tuple[float, ...]
    speedups: tuple[float, ...]
    """Predicted speed relative to one worker, for each number of workers."""
    pays_to: int
    """Largest number of workers that trains at least a tenth faster than half as many workers; 1 if no number does."""
    beats_one_from: int | None
    """Smallest number of workers that trains faster than one worker alone; None if no number does."""
    beats_one_to: int | None
    """Largest number of workers that trains faster than one worker alone; None if no number does."""

    def document(self) -> dict[str, Any]:
        """Return the curve as plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Crossover:
    """The nearest value of a quantity at which another strategy becomes better than the recommended strategy."""

    quantity: str
    """Name of the quantity: bandwidth (in bytes per second), parameters, or straggling (the probability that a slow
    spell begins at a step).
    """
    value: float
    here: float
    """Value of the quantity for the plan's job and cluster."""
    below: str
    """Name of the best strategy for values of the quantity below the crossover."""
    above: str

    def document(self) -> dict[str, Any]:
        """Return the crossover as plain data, for JSON."""
        return dataclasses.asdict(self)


def curve(one: ScalablePrediction, site: Site, single: float, sizes: Sequence[int] = WORKERS) -> Curve:
    """Return the scaling curve of a strategy, relative to `single` samples per second. Numbers of workers at which the
    strategy cannot run are omitted.
    """
    rates = {workers: rate for workers in sizes if (rate := one.rate(site, workers)) > 0}
    speedups = {workers: one.effective_rate(site, workers) / single for workers in rates}
    pays = [many for few, many in itertools.pairwise(speedups) if speedups[many] >= PAYS * speedups[few]]
    beats = [workers for workers, speedup in speedups.items() if workers > 1 and speedup > 1]
    figures = tuple(rates), tuple(rates.values()), tuple(speedups.values())
    return Curve(one.name, *figures, max(pays, default=1), min(beats, default=None), max(beats, default=None))


def crossovers(
    predictions: Sequence[ScalablePrediction],
    site: Site,
    workers: int,
    choice: str,
    slower: float = 1.0,
    unbalanced: bool = False,
) -> tuple[Crossover, ...]:
    """Return the nearest bandwidth, model size and straggling at which another strategy becomes better than `choice`.

    One quantity is varied at a time, up and down from its current value. Every part of a step except computing is
    assumed to take `slower` times as long, and workers to have different data if `unbalanced`. Strategies are compared
    as in an advice (`criteria.preference`). The result is empty if there is no prediction for `choice`.
    """
    bandwidth, size, law = site.link[1], float(site.task.elements), site.compute(workers)
    chosen = next((one for one in predictions if one.name == choice), None)
    if workers < 2 or chosen is None or not math.isfinite(bandwidth):
        return ()

    def rate(one: ScalablePrediction, there: Site, law: ComputeModel | None = None) -> float:
        return preference(one.found, one.effective_rate(there, workers, law, slower, unbalanced))

    here = rate(chosen, site)
    others = [one for one in predictions if one is not chosen and rate(one, site) <= here]

    def by_bandwidth(value: float, one: ScalablePrediction) -> float:
        return rate(one, replace(site, cluster=faster(site.cluster, value / bandwidth)))

    def by_size(value: float, one: ScalablePrediction) -> float:
        return rate(one, replace(site, task=site.task.scaled(value / size)))

    def by_straggling(value: float, one: ScalablePrediction) -> float:
        return rate(one, site, _straggling(law, value))

    rare = [math.exp(math.log(RARE) + i * math.log(USUAL / RARE) / SCAN) for i in range(SCAN + 1)]
    found = [
        _leaves("bandwidth", by_bandwidth, chosen, others, bandwidth, _from(bandwidth, 1 / REACH)),
        _leaves("bandwidth", by_bandwidth, chosen, others, bandwidth, _from(bandwidth, REACH)),
        _leaves("parameters", by_size, chosen, others, size, _from(size, max(1 / size, 1 / REACH))),
        _leaves("parameters", by_size, chosen, others, size, _from(size, REACH)),
        _leaves("straggling", by_straggling, chosen, others, 0.0, rare),
    ]
    return tuple(one for one in found if one is not None)


def _from(here: float, reach: float) -> Iterable[float]:
    """Points from the present value to `reach` times that value."""
    return [here * reach ** ((i + 1) / SCAN) for i in range(SCAN)]


def best(
    predictions: Sequence[ScalablePrediction],
    site: Site,
    workers: int,
    law: ComputeModel | None = None,
    slower: float = 1.0,
    unbalanced: bool = False,
) -> str:
    """Return the name of the strategy that an advice prefers on `site` with `workers` workers: the one that processes
    the most effective samples per second, or one worker unless the gain is clear (`criteria.preference`).
    """

    def rank(one: ScalablePrediction) -> float:
        return preference(one.found, one.effective_rate(site, workers, law, slower, unbalanced))

    return max(predictions, key=rank).name


def _straggling(law: ComputeModel, probability: float) -> ComputeModel:
    """The compute model with slow spells added: five times as slow for ten steps."""
    if isinstance(law, SharedCores):
        return replace(law, base=SlowSpells(law.base, probability, FACTOR, LENGTH))
    return SlowSpells(law, probability, FACTOR, LENGTH)


def _leaves(
    quantity: str,
    ask: Ask,
    chosen: ScalablePrediction,
    others: Sequence[ScalablePrediction],
    here: float,
    points: Iterable[float],
) -> Crossover | None:
    """The first value along `points` at which another strategy is better than the choice.

    Between two points, only strategies that are better at the second point are compared with the choice; a strategy
    that is better only in between is missed.
    """
    if here > 0:  # as far as known: a scaled model has no shapes, on which some strategies depend
        least = ask(here, chosen)
        others = [one for one in others if ask(here, one) <= least] if least > 0 else []
    near = here
    for far in points:
        ahead = _ahead(ask, far, chosen, others)
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


def _ahead(
    ask: Ask, value: float, chosen: ScalablePrediction, others: Sequence[ScalablePrediction]
) -> list[ScalablePrediction]:
    least = ask(value, chosen)
    return [one for one in others if ask(value, one) > least]
