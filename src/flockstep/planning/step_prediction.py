"""Predicts the cost of a step of one strategy on a cluster, by running the strategy's program in virtual time and
extrapolating to many workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any, Literal

import numpy as np

from flockstep.costs.cluster import ClusterShape
from flockstep.errors import ConfigurationError
from flockstep.partitions.base import Partition
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.rehearsal import MOST, Rehearsal, rehearse
from flockstep.planning.split_shape import SplitShape
from flockstep.planning.surrogate import SurrogateBatches, longest_cycle
from flockstep.records.config import RunConfig
from flockstep.report.formatting import seconds as in_seconds
from flockstep.simulation.compute import ComputeModel, ConstantTime, SharedCores, Wrapper
from flockstep.simulation.handling import Handled, Longer
from flockstep.simulation.law import late_of, mean_of
from flockstep.simulation.network import Link, Network
from flockstep.simulation.tiers import Tiers
from flockstep.strategies.base import Strategy
from flockstep.strategies.encoding import codecs_of

ALONE = "one worker"
"""Name of the prediction for plain training on one worker, which needs no strategy."""
FEW = 16
"""Largest number of workers for which a step is rehearsed; steps of more workers are extrapolated."""
SIZES = (4, 8, 16)
"""Numbers of workers for which steps are rehearsed to extrapolate to larger numbers."""
LONG = 4
"""Smallest period of a strategy, in steps, for which a quick rehearsal may have one period only, which has no range."""
SPREAD = 0.01
"""Delay of the slowest worker, as a share of a gradient, above which stragglers are taken into account."""
WIDE = 1 / 2
"""Largest accepted range of a step's seconds, as a share of the seconds."""
FACTOR, EVERY = 5.0, 4
"""FACTOR: slowdown of a slow gradient. EVERY: number of steps between slow gradients. With both, the exposure of a
strategy to stragglers is measured on a cluster that has none.
"""
LEAST = 1e-12
"""Seconds assumed for a step in which a worker computes and sends nothing."""
DECADE = 10.0
"""Base of the ratios of model size to bandwidth at which steps are rehearsed: 1/10, 1 and 10, and beyond these every
second power of ten.
"""

_known = lru_cache(maxsize=4096)(rehearse)
"""`rehearse` with a cache: tables, scaling and crossovers need the same rehearsals."""


@dataclass(frozen=True)
class StepPrediction:
    """Predicted means of a strategy's steps, in seconds and bytes. A step is one gradient of each worker."""

    name: str
    strategy: Strategy | None
    """The predicted strategy; None for training on one worker."""
    workers: int
    seconds: float
    utilization: float
    """Share of the time in which a worker computes."""
    sent_bytes: float
    """Bytes that a worker sends per step."""
    server_bytes: float
    """Bytes per step that the busiest server sends and receives."""
    staleness: float | None
    """Mean staleness of updates in versions; None if the strategy has no versions."""
    staleness_most: int | None
    """Largest staleness of an update in the rehearsal, in versions."""
    samples_per_second: float
    memory: float
    """Bytes of memory on a worker: parameters, gradient, optimizer, the strategy's state, and activations if they are
    known.
    """
    source: Literal["rehearsal", "extrapolation"]
    """Text that says how the figures were obtained: by a rehearsal or by an extrapolation."""
    notes: tuple[str, ...] = ()
    range: float = 0.0
    """Half the width of the range of `seconds` and `samples_per_second`, as a share of them; 0 for an extrapolation."""
    updates: bool = True
    """Whether the rehearsal recorded any update; without updates, the number of samples needed is unknown."""

    @property
    def lossless(self) -> bool:
        """Whether messages contain exact values, without loss by a codec."""
        return all(one.lossless for one in codecs_of(self.strategy))

    def document(self) -> dict[str, Any]:
        """Return the prediction as plain data, for JSON."""
        names = (
            "name workers seconds utilization sent_bytes server_bytes staleness staleness_most samples_per_second "
            "memory source range"
        )
        return {**{name: getattr(self, name) for name in names.split()}, "notes": list(self.notes)}


def alone(site: Site) -> StepPrediction:
    """Return the prediction for one worker on the fastest machine, which sends no messages."""
    task = site.task
    count = site.cluster.workers
    seconds = min(mean_of(site.compute(count), rank) for rank in range(count))
    seconds += task.elements / site.rate("optimizer", site.optimizer)
    rate = task.batch / seconds if seconds else math.inf
    memory = held_bytes(task)
    return StepPrediction(ALONE, None, 1, seconds, 1.0, 0.0, 0.0, 0.0, 0, rate, memory, "rehearsal")


def at_most(rate: float, site: Site, workers: int) -> float:
    """Return the samples per second of `workers` workers, which are at most as many times those of one worker.

    A strategy that cancels slow gradients would exceed them where the compute model draws each duration anew, which a
    slow machine does not do.
    """
    return min(rate, workers * alone(site).samples_per_second)


def held_bytes(task: JobProfile) -> float:
    """Return the bytes of memory on a worker, without the state of its strategy: parameters, gradient, optimizer and
    activations.
    """
    return task.nbytes * (2.0 + task.slots) + task.activations


class Unpredictable(ConfigurationError):
    """Error: the steps of a strategy vary too much for a prediction of their mean."""


def predict_step(strategy: Strategy, site: Site, workers: int, steps: int | None = None) -> StepPrediction:
    """Predict the cost of a strategy's step by a rehearsal of `steps` steps. If `steps` is None, the rehearsal takes as
    many steps as it needs.

    Steps of more than 16 workers are extrapolated from rehearsals with fewer workers in which every link is as slow as
    the slowest.

    Raises:
        ConfigurationError: the strategy cannot run with this number of workers, or the cost of a step is unknown.
        Unpredictable: the range of a step's seconds is wider than `WIDE`.
    """
    strategy.check(workers)
    if workers > FEW:
        return _extrapolated(strategy, site, workers)
    found = rehearsed(strategy, site, workers, steps=steps)
    _require_narrow(found)
    return _of_rehearsal(strategy, site, workers, found)


def _require_narrow(found: Rehearsal) -> None:
    """Raise `Unpredictable` if the range of a step's seconds is too wide."""
    if found.range > WIDE:
        low, high = (found.seconds_per_step * (1 + sign * found.range) for sign in (-1, 1))
        raise Unpredictable(
            f"cannot be predicted: after {found.steps} steps of a rehearsal, a step may take {in_seconds(max(low, 0))} "
            f"to {in_seconds(high)}; try the strategy with flockstep simulate"
        )


def on_cluster(config: RunConfig, shape: ClusterShape) -> RunConfig:
    """Return the configuration of a run in virtual time in which links, gradients, messages and steps have the same
    costs as on a cluster.

    Raises:
        ConfigurationError: the cluster cannot have this number of workers.
    """
    site = Site(task_of(config.job, config.batch), shape)
    strategy, partition = Strategy.parse(config.strategy), Partition.parse(config.partition or "none")
    replicas = partition.replicas(config.workers)
    work = site.work(strategy, replicas, _share_encoded(strategy, site, replicas))
    network = Handled(shape.network(config.workers), work.message, work.receive, work.serve, copy=work.copy)
    compute = Longer(site.compute(config.workers), work.step)
    return replace(config, network=str(network), compute=str(compute), cluster=shape.name)


def _share_encoded(strategy: Strategy, site: Site, workers: int) -> float:
    """Share of its steps in which a worker encodes."""
    once = site.encoded(strategy)
    if once is None:
        return 1.0
    sent = rehearsed(strategy, site, workers, quick=True).sent_bytes_per_step
    return 1.0 if sent > once / 2 else sent / once


def rehearsed(
    strategy: Strategy,
    site: Site,
    workers: int,
    law: ComputeModel | None = None,
    *,
    quick: bool = False,
    even: bool = False,
    ratio: float = 1.0,
    steps: int | None = None,
) -> Rehearsal:
    """Rehearse a strategy in virtual time on the site's machines and links, with the costs of messages and steps.

    `law` replaces the cluster's compute model; `quick` uses a small surrogate for the model; `even` makes every link as
    slow as the slowest; `ratio` is a factor on the time that the model takes over links.
    """
    task, coding = site.task, 1.0
    cluster = site.cluster if ratio == 1 else faster(site.cluster, 1 / ratio)
    network = _even(cluster, Link(site.link[1] / ratio, site.link[0]), workers) if even else cluster.network(workers)
    while True:
        work = site.work(strategy, workers, coding)
        found = _known(
            strategy,
            workers,
            task.nbytes,
            site.compute(workers) if law is None else law,
            network,
            tensors=task.tensors,
            dtype_bytes=task.itemsize,
            optimizer=task.optimizer,
            steps=steps,
            surrogate_batches=task.surrogate_batches if strategy.traits.needs_job else None,
            work=work,
            quick=quick,
        )
        once = site.encoded(strategy)
        if coding < 1 or once is None or found.sent_bytes_per_step > once / 2:
            return found
        coding = found.sent_bytes_per_step / once  # the worker encodes in some of its steps only


def _even(cluster: ClusterShape, link: Link, workers: int) -> Network:
    """A network in which `link` connects all workers, each on its own machine; servers are where the cluster has
    them.
    """
    if cluster.servers_apart or len(cluster.placed(workers)) == 1:
        return link
    return Tiers((1,) * workers, (0,) * workers, (Link(math.inf),), (link,))


def rehearsed_split(
    strategy: Strategy, site: Site, workers: int, shape: SplitShape, law: ComputeModel, steps: int | None = None
) -> Rehearsal:
    """Rehearse a strategy whose replicas are split into the parts of `shape`, with the costs of the site's machines and
    links.

    `law` is the compute model of the gradients of the whole model. A rehearsal of a given number of `steps` uses a
    small surrogate.
    """
    task, replicas = site.task, shape.partition.replicas(workers)
    return _known(
        strategy,
        workers,
        task.nbytes,
        law,
        site.cluster.network(workers),
        tensors=shape.tensors,
        dtype_bytes=task.itemsize,
        optimizer=task.optimizer,
        steps=steps,
        quick=steps is not None,
        surrogate_batches=SurrogateBatches(task.batch),
        work=site.work(strategy, replicas, _share_encoded(strategy, site, replicas)),
        split=shape,
    )


def _of_rehearsal(strategy: Strategy, site: Site, workers: int, found: Rehearsal) -> StepPrediction:
    task, seconds, versions = site.task, found.seconds_per_step, has_versions(strategy)
    return StepPrediction(
        str(strategy),
        strategy,
        workers,
        seconds,
        found.utilization,
        found.sent_bytes_per_step,
        _through_server(strategy, found),
        found.staleness if versions else None,
        found.staleness_max if versions else None,
        at_most(found.used * found.batches * task.batch * found.steps_per_second, site, workers),
        held_bytes(task) + found.held,
        "rehearsal",
        (f"{found.steps} steps in virtual time",),
        found.range,
        found.updates,
    )


def has_versions(strategy: Strategy) -> bool:
    """Return whether staleness counts versions of one model, rather than steps of replicas that differ."""
    return strategy.traits.delivery == "synchronous" or strategy.traits.server_optimizer


def _extrapolated(strategy: Strategy, site: Site, workers: int) -> StepPrediction:
    """Extrapolate from fewer workers with constant times and equal links, and add the cost of the slowest worker."""
    pace = Pace(strategy, site)
    long = longest_cycle(strategy, MOST) >= LONG
    for found in (*pace.small_rehearsals, *([pace.longer(pace.sizes[-1])] if long else [])):
        _require_narrow(found)
    moved, mean = pace.at(site, workers), mean_of(site.compute(workers))
    return StepPrediction(
        str(strategy),
        strategy,
        workers,
        moved.seconds,
        min(1.0, mean / moved.seconds) if moved.seconds else 1.0,
        moved.sent_bytes,
        pace.grown(lambda found: _through_server(strategy, found), workers),
        moved.staleness,
        None,
        at_most(moved.samples_per_second, site, workers),
        held_bytes(site.task) + pace.grown(lambda found: found.held, workers),
        "extrapolation",
        (
            (
                f"extrapolated from rehearsals with {', '.join(map(str, pace.sizes))} workers in which every link is "
                "as slow as the slowest"
            ),
        ),
        updates=pace.updates,
    )


def _through_server(strategy: Strategy, found: Rehearsal) -> float:
    """Bytes through the busiest server for each step that a worker takes."""
    server, workers = found.server_sent_bytes_per_step, found.workers
    return server + workers * found.sent_bytes_per_step / max(1, strategy.servers_for(workers)) if server else 0.0


def grown(sizes: Sequence[int], values: Sequence[float], workers: int) -> float:
    """Extrapolate a value to `workers` workers by a fit of terms that occur in the costs of collectives and servers.

    The fit is least squares with nonnegative coefficients of 1, log n (latencies along a tree), n - 1 (messages of all
    workers through one network card) and 1 - 1/n (the share of a model that belongs to other workers).
    """
    if not any(values):
        return 0.0
    at = np.array([*sizes, workers], dtype=float)
    terms = np.stack([np.ones_like(at), np.log2(at), at - 1, 1 - 1 / at], axis=1)
    scale = np.array(values)
    weights = 1 / np.where(scale > 0, scale, scale.max())
    best, answer = math.inf, float(values[-1])
    for count in range(1, min(len(sizes), terms.shape[1]) + 1):
        for chosen in combinations(range(terms.shape[1]), count):
            known = terms[:-1, chosen] * weights[:, None]
            factors = np.linalg.lstsq(known, scale * weights, rcond=None)[0]
            error = float(((known @ factors - scale * weights) ** 2).sum())
            if (factors >= -1e-9).all() and error < best * 0.9 - 1e-12:
                best, answer = error, float(terms[-1, chosen] @ factors)
    return answer


@dataclass(frozen=True)
class Moved:
    """The cost of a step under conditions other than those of the plan."""

    seconds: float
    samples_per_second: float
    """Samples per second of all workers together."""
    sent_bytes: float
    staleness: float | None


@dataclass(frozen=True)
class Pace:
    """Predicts a strategy's step time for other numbers of workers, bandwidths, model sizes and stragglers, from short
    rehearsals.

    The rehearsals have constant gradient times; `exposure` times the mean delay of the slowest worker is added. Steps
    of more than 16 workers are extrapolated, and steps between two ratios of size and bandwidth are interpolated.
    """

    strategy: Strategy
    site: Site
    """The task and the cluster of the plan."""
    found: StepPrediction | None = None
    """The prediction for the plan's own task and cluster; None if this prediction was not rehearsed."""

    @cached_property
    def exposure(self) -> float:
        """Share of the slowest worker's delay that all workers suffer: about 1 with a barrier, about 0 without a
        barrier.
        """
        whole = self.found is not None and self.found.workers <= FEW
        count = self.site.cluster.workers if self.found is None else self.found.workers
        few = min(SIZES[-2], count)
        workers = count if whole else few
        law = self.site.compute(workers)
        mean = mean_of(law)
        if late_of(law, workers) > SPREAD * mean:
            found = rehearsed(self.strategy, self.site, workers, even=not whole)
            if found.exposure is not None:
                return found.exposure
        if few == 1 or not mean:
            return 0.0
        steady, bare = as_steady(self.site.compute(few)), self._rehearsed(few, not whole)
        each = (FACTOR - 1) * mean / EVERY  # by which a step is longer if all workers wait for the slow one
        slow = Hiccups(steady, FACTOR, EVERY, few)
        steps = 4 + 2 * EVERY * min(few, 4)
        found = rehearsed(self.strategy, self.site, few, slow, quick=True, even=not whole, steps=steps)
        return max(0.0, (found.seconds_per_step - bare.seconds_per_step - each / few) / (each - each / few))

    @cached_property
    def sizes(self) -> list[int]:
        """Numbers of workers for which steps are rehearsed to extrapolate to larger numbers."""
        return [n for n in SIZES if self._runs(n)]

    def grown(self, measure: Callable[[Rehearsal], float], workers: int) -> float:
        """Extrapolate a figure from rehearsals with few workers to `workers` workers."""
        return grown(self.sizes, list(map(measure, self.small_rehearsals)), workers)

    @cached_property
    def small_rehearsals(self) -> list[Rehearsal]:
        """The rehearsals from which steps of larger numbers of workers are extrapolated, one for each of `sizes`.

        A quick rehearsal with a wide range is replaced by a longer rehearsal.
        """
        quick = [self._rehearsed(n, even=True) for n in self.sizes]
        return [self.longer(one.workers) if one.range > WIDE else one for one in quick]

    def longer(self, workers: int) -> Rehearsal:
        """Return a rehearsal that is long enough for a range, also if the strategy has a long period."""
        return self._rehearsed(workers, even=True, quick=False)

    @property
    def updates(self) -> bool:
        """Whether any node recorded an update in the rehearsal with the most workers."""
        return self._rehearsed(self.sizes[-1], even=True).updates

    def at(self, site: Site, workers: int, law: ComputeModel | None = None) -> Moved:
        """Return the cost of a step of `workers` workers on a site with another model size or bandwidth.

        Raises:
            ConfigurationError: the strategy or the cluster cannot have this number of workers.
        """
        found, here = self._moved(site, workers, law), self.found
        if here is None or workers != here.workers or here.source != "rehearsal":
            return found
        off = here.seconds - self._as_planned.seconds  # of the short rehearsal
        seconds = max(found.seconds + off, LEAST)
        rate = found.samples_per_second * found.seconds / seconds
        rate *= (
            here.samples_per_second * here.seconds / (self._as_planned.samples_per_second * self._as_planned.seconds)
        )
        return replace(found, seconds=seconds, samples_per_second=rate)

    @cached_property
    def _as_planned(self) -> Moved:
        """Cost of a step on the plan's site, computed as for any other site."""
        assert self.found is not None
        return self._moved(self.site, self.found.workers, None)

    def _moved(self, site: Site, workers: int, law: ComputeModel | None) -> Moved:
        law = site.compute(workers) if law is None else law
        self.strategy.check(workers)
        size = site.task.nbytes / self.site.task.nbytes
        ratio = size * self.site.link[1] / site.link[1] if math.isfinite(site.link[1]) else 1.0
        usual = self.site.compute(min(workers, FEW))
        if workers > FEW:
            seconds, few = self.grown(lambda found: found.seconds_per_step, workers), self._rehearsed(FEW, even=True)
            if ratio != 1:
                seconds *= self._between(FEW, True, ratio) / few.seconds_per_step
            sent = self.grown(lambda found: found.sent_bytes_per_step, workers)
            late: float | None = self.grown(lambda found: found.staleness or 0.0, workers)
        else:
            few = self._rehearsed(workers)
            seconds, sent, late = self._between(workers, False, ratio), few.sent_bytes_per_step, few.staleness
        seconds += (size - 1) * self.site.work(self.strategy, workers).step + mean_of(law) - mean_of(usual)
        seconds = max(seconds + self.exposure * late_of(law, workers), LEAST)
        rate = few.used * few.batches * workers * site.task.batch / seconds
        late = late if has_versions(self.strategy) and few.staleness is not None else None
        return Moved(seconds, rate * few.unevenness, sent * size, late)

    def _runs(self, workers: int) -> bool:
        try:
            self.strategy.check(workers)
            self.site.compute(workers)
        except ConfigurationError:
            return False
        return True

    def _between(self, workers: int, even: bool, ratio: float) -> float:
        """Seconds of a step where the model takes `ratio` times as long over the links: between two that were tried."""
        at = math.log10(ratio) + 1e-9
        low, high = _places(at)
        first = self._rehearsed(workers, even, low).seconds_per_step
        if at - low < 1e-6:
            return first
        second = self._rehearsed(workers, even, high).seconds_per_step
        below, above = DECADE**low, DECADE**high
        return first + (second - first) * (ratio - below) / (above - below)

    def _rehearsed(self, workers: int, even: bool = False, place: int = 0, quick: bool = True) -> Rehearsal:
        """A rehearsal with constant gradient times, and links over which the model takes ten to the `place` times as
        long.
        """
        law, ratio = as_steady(self.site.compute(workers)), DECADE**place
        return rehearsed(self.strategy, self.site, workers, law, quick=quick, even=even, ratio=ratio)


def _places(at: float) -> tuple[int, int]:
    """The powers of ten that are rehearsed below and above: beyond 1/10 and 10 steps are all but straight lines."""
    if abs(at) < 1:
        return math.floor(at), math.floor(at) + 1
    low = 2 * math.floor((at - 1) / 2) + 1
    return low, low + 2


@dataclass(frozen=True)
class Hiccups(Wrapper):
    """A compute model with stragglers: every `every` steps, the gradient of the next worker in turn takes `factor`
    times as long.
    """

    factor: float
    every: int
    workers: int

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        for number, seconds in enumerate(self.base.stream(seed, rank)):
            turn, within = divmod(number, self.every)
            yield seconds * (self.factor if within == self.every - 1 and turn % self.workers == rank else 1.0)


def faster(cluster: ClusterShape, factor: float) -> ClusterShape:
    """Return a cluster with `factor` times the bandwidth on every link."""
    return replace(cluster, wires=tuple(replace(wire, bandwidth=wire.bandwidth * factor) for wire in cluster.wires))


def as_steady(law: ComputeModel) -> ComputeModel:
    """Return a compute model in which every gradient takes the mean duration of the given model."""
    steady = ConstantTime(mean_of(law))
    return replace(law, base=steady) if isinstance(law, SharedCores) else steady
