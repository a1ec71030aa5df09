"""Predicts the cost of a step of one strategy on a cluster, by running the strategy's program in virtual time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from flockstep.costs.cluster import ClusterShape
from flockstep.errors import ConfigurationError
from flockstep.partitions.base import Partition
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.rehearsal import Conditions, Rehearsal, rehearse
from flockstep.planning.split_surrogate import SplitShape
from flockstep.records.config import RunConfig
from flockstep.report.formatting import seconds as in_seconds
from flockstep.simulation.compute import ComputeModel, ConstantTime, SharedCores, Wrapper
from flockstep.simulation.handling import Handled, Longer
from flockstep.simulation.law import late_of, mean_of
from flockstep.strategies.base import Strategy
from flockstep.strategies.encoding import codecs_of

ALONE = "one worker"
"""Name of the prediction for plain training on one worker, which needs no strategy."""
MOST = 64
"""Largest number of workers of a prediction, because a rehearsal of more would take minutes."""
FEW = 8
"""Largest number of workers of the rehearsals that measure the exposure to stragglers."""
SPREAD = 0.01
"""Delay of the slowest worker, as a share of a gradient, above which stragglers are taken into account."""
WIDE = 1 / 2
"""Largest accepted range of a step's seconds, as a share of the seconds."""
FACTOR, EVERY = 5.0, 4
"""FACTOR: slowdown of a slow gradient. EVERY: number of steps between slow gradients. With both, the exposure of a
strategy to stragglers is measured on a cluster that has none.
"""

_known = lru_cache(maxsize=4096)(rehearse)
"""`rehearse` with a cache: tables and criteria need the same rehearsals."""


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
    notes: tuple[str, ...] = ()
    range: float = 0.0
    """Half the width of the range of `seconds` and `samples_per_second`, as a share of them."""
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
            "memory range"
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
    return StepPrediction(ALONE, None, 1, seconds, 1.0, 0.0, 0.0, 0.0, 0, rate, memory)


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

    Raises:
        ConfigurationError: the strategy cannot run with this number of workers, which are more than `MOST`, or the cost
            of a step is unknown.
        Unpredictable: the range of a step's seconds is wider than `WIDE`.
    """
    strategy.check(workers)
    if workers > MOST:
        raise ConfigurationError(
            f"a prediction takes at most {MOST} workers, got {workers:,}; for more, use flockstep simulate"
        )
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
    sent = rehearsed(strategy, site, workers).sent_bytes_per_step
    return 1.0 if sent > once / 2 else sent / once


def rehearsed(
    strategy: Strategy,
    site: Site,
    workers: int,
    law: ComputeModel | None = None,
    *,
    steps: int | None = None,
    split: SplitShape | None = None,
) -> Rehearsal:
    """Rehearse a strategy in virtual time on the site's machines and links, with the costs of messages and steps.

    `law` replaces the cluster's compute model. `split` says how workers split each replica. A rehearsal of a given
    number of `steps` uses a small surrogate.
    """
    replicas = workers if split is None else split.partition.replicas(workers)
    coding = 1.0 if split is None else _share_encoded(strategy, site, replicas)
    while True:
        at = Conditions(
            site.compute(workers) if law is None else law,
            site.cluster.network(workers),
            site.work(strategy, replicas, coding),
        )
        found = _known(site.task, strategy, workers, at, steps=steps, split=split)
        once = site.encoded(strategy)
        if split is not None or coding < 1 or once is None or found.sent_bytes_per_step > once / 2:
            return found
        coding = found.sent_bytes_per_step / once  # the worker encodes in some of its steps only


def _of_rehearsal(strategy: Strategy, site: Site, workers: int, found: Rehearsal) -> StepPrediction:
    task, seconds, versions = site.task, found.seconds_per_step, has_versions(strategy)
    return StepPrediction(
        str(strategy),
        strategy,
        workers,
        seconds,
        found.utilization,
        found.sent_bytes_per_step,
        _through_server(strategy, found, workers),
        found.staleness if versions else None,
        found.staleness_max if versions else None,
        at_most(found.used * found.batches * task.batch * found.steps_per_second, site, workers),
        held_bytes(task) + found.held,
        (f"{found.steps} steps in virtual time",),
        found.range,
        found.updates,
    )


def has_versions(strategy: Strategy) -> bool:
    """Return whether staleness counts versions of one model, rather than steps of replicas that differ."""
    return strategy.traits.delivery == "synchronous" or strategy.traits.server_optimizer


def _through_server(strategy: Strategy, found: Rehearsal, workers: int) -> float:
    """Bytes through the busiest server for each step that a worker takes."""
    server = found.server_sent_bytes_per_step
    return server + workers * found.sent_bytes_per_step / max(1, strategy.servers_for(workers)) if server else 0.0


def exposure(strategy: Strategy, site: Site, workers: int) -> float:
    """Return the share of the slowest worker's delay that all workers suffer: about 1 with a barrier, about 0 without a
    barrier.
    """
    law = site.compute(workers)
    mean = mean_of(law)
    if late_of(law, workers) > SPREAD * mean:
        found = rehearsed(strategy, site, workers)
        if found.exposure is not None:
            return found.exposure
    few = min(FEW, workers)
    if few == 1 or not mean:
        return 0.0
    # The law has no stragglers, or the rehearsal does not tell their share: one worker in turn is made slow.
    steady = as_steady(site.compute(few))
    bare = rehearsed(strategy, site, few, steady).seconds_per_step
    each = (FACTOR - 1) * mean / EVERY  # by which a step is longer if all workers wait for the slow one
    steps = 4 + 2 * EVERY * min(few, 4)
    slow = rehearsed(strategy, site, few, Hiccups(steady, FACTOR, EVERY, few), steps=steps).seconds_per_step
    return max(0.0, (slow - bare - each / few) / (each - each / few))


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


def as_steady(law: ComputeModel) -> ComputeModel:
    """Return a compute model in which every gradient takes the mean duration of the given model."""
    steady = ConstantTime(mean_of(law))
    return replace(law, base=steady) if isinstance(law, SharedCores) else steady
