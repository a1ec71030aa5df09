"""Predicts the cost of a step of one strategy on a cluster, with whole or split replicas, by running the strategy's
program in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from flockstep.costs.cluster import ClusterShape
from flockstep.errors import ConfigurationError
from flockstep.partitions.base import Partition, Unsplit
from flockstep.planning.job_profile import JobProfile, Site, task_of
from flockstep.planning.rehearsal import Conditions, Rehearsal, rehearse
from flockstep.planning.split_surrogate import SplitShape, split_shape
from flockstep.records.config import RunConfig
from flockstep.report.formatting import seconds as in_seconds
from flockstep.simulation.compute import ComputeModel, ConstantTime, SharedCores, Wrapper
from flockstep.simulation.handling import Handled, Longer
from flockstep.simulation.law import late_of, mean_of
from flockstep.strategies.base import Strategy
from flockstep.strategies.encoding import codecs_of

ALONE = "one worker"
"""Name of the prediction for plain training on one worker, which needs no strategy."""
WHOLE = Unsplit()
"""The partition of whole replicas, one for each worker."""
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
    """Predicted means of a strategy's steps, in seconds and bytes. A step is one gradient of each replica."""

    name: str
    """Name of the strategy; for split replicas, the partition and the strategy."""
    strategy: Strategy | None
    """The predicted strategy; None for training on one worker."""
    workers: int
    seconds: float
    """Seconds between two gradients of a replica."""
    utilization: float
    """Share of the time in which a worker computes."""
    sent_bytes: float
    """Bytes that a worker sends per step, including those to the other workers of its replica."""
    server_bytes: float
    """Bytes per step that the busiest server sends and receives."""
    staleness: float | None
    """Mean staleness of updates in versions; None if the strategy has no versions."""
    staleness_most: int | None
    """Largest staleness of an update in the rehearsal, in versions."""
    samples_per_second: float
    """Samples per second of all workers together."""
    memory: float
    """Bytes of memory on the worker that needs most: parameters, gradient, optimizer, the strategy's state, and
    activations if they are known.
    """
    notes: tuple[str, ...] = ()
    range: float = 0.0
    """Half the width of the range of `seconds` and `samples_per_second`, as a share of them."""
    updates: bool = True
    """Whether the rehearsal recorded any update; without updates, the number of samples needed is unknown."""
    partition: Partition = WHOLE
    """How the workers of a replica split the model."""
    layers: tuple[str, ...] = ()
    """The layers of each part of a split model, as text."""
    bytes_between_parts: float = 0.0
    """Bytes per step that a worker sends to the other workers of its replica."""

    @property
    def split(self) -> bool:
        """Whether several workers hold a replica together."""
        return self.partition != WHOLE

    @property
    def replicas(self) -> int:
        """Number of replicas, each of which one worker, or the workers of a split model, hold."""
        return self.partition.replicas(self.workers)

    @property
    def exchanged_bytes(self) -> float:
        """Bytes that the workers of a replica send per step to other replicas and servers."""
        return max(0.0, self.sent_bytes - self.bytes_between_parts) * self.partition.parts

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
    return StepPrediction(ALONE, None, 1, seconds, 1.0, 0.0, 0.0, 0.0, 0, rate, held_bytes(task))


def held_bytes(task: JobProfile, split: SplitShape | None = None) -> float:
    """Return the bytes of memory on the worker that needs most, without the state of its strategy: parameters and
    their copies, gradient, optimizer, and the outputs of all layers for a batch if the layers are known.
    """
    if split is not None:
        return split.elements_held(task.slots) * task.itemsize
    activations = 0.0 if task.shape is None else float(task.shape.activation_bytes(task.batch))
    return task.nbytes * (2.0 + task.slots) + activations


class Unpredictable(ConfigurationError):
    """Error: the steps of a strategy vary too much for a prediction of their mean."""


def predict_step(
    strategy: Strategy,
    site: Site,
    workers: int,
    steps: int | None = None,
    *,
    partition: Partition = WHOLE,
    law: ComputeModel | None = None,
) -> StepPrediction:
    """Predict the cost of a strategy's step by a rehearsal.

    Args:
        strategy: the strategy, which coordinates the replicas.
        site: the task and the cluster.
        workers: number of workers.
        steps: number of steps of the rehearsal; None for as many as it needs.
        partition: how the workers of a replica split the model.
        law: the compute model of gradients; None for that of the cluster.

    Raises:
        ConfigurationError: the model cannot be split, the strategy cannot run with this number of replicas, the workers
            are more than `MOST`, or the cost of a step is unknown.
        CompositionError: the strategy cannot train a split model.
        Unpredictable: the range of the seconds of a step of whole replicas is wider than `WIDE`.
    """
    task, whole = site.task, partition == WHOLE
    shape = None if whole else split_shape(task, partition)
    replicas = partition.replicas(workers)
    strategy.check(replicas)
    if workers > MOST:
        raise ConfigurationError(
            f"a prediction takes at most {MOST} workers, got {workers:,}; for more, use flockstep simulate"
        )
    found = rehearsed(strategy, site, workers, law, steps=steps, split=shape)
    if whole and found.range > WIDE:
        low, high = (found.seconds_per_step * (1 + sign * found.range) for sign in (-1, 1))
        raise Unpredictable(
            f"cannot be predicted: after {found.steps} steps of a rehearsal, a step may take {in_seconds(max(low, 0))} "
            f"to {in_seconds(high)}; try the strategy with flockstep simulate"
        )
    versions, server = has_versions(strategy), found.server_sent_bytes_per_step
    if server:  # the busiest server also receives what the workers send
        server += workers * found.sent_bytes_per_step / max(1, strategy.servers_for(workers))
    # A strategy that cancels slow gradients would be more than `workers` times as fast as one worker where the compute
    # model draws each duration anew, which a slow machine does not do.
    rate = min(
        found.used * found.batches * task.batch * found.steps_per_second / partition.parts,
        workers * alone(site).samples_per_second,
    )
    return StepPrediction(
        str(strategy) if whole else f"{partition} with {strategy if replicas > 1 else 'one replica'}",
        strategy,
        workers,
        found.seconds_per_step,
        found.utilization,
        found.sent_bytes_per_step,
        server,
        found.staleness if versions else None,
        found.staleness_max if versions else None,
        rate,
        held_bytes(task, shape) + found.held,
        (f"{found.steps} steps in virtual time",),
        found.range,
        found.updates,
        partition,
        () if shape is None else shape.layers,
        found.bytes_between_parts,
    )


def on_cluster(config: RunConfig, shape: ClusterShape) -> RunConfig:
    """Return the configuration of a run in virtual time in which links, gradients, messages and steps have the same
    costs as on a cluster.

    Raises:
        ConfigurationError: the cluster cannot have this number of workers.
    """
    site = Site(task_of(config.job, config.batch, sealed=config), shape)
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
    law = site.compute(workers) if law is None else law

    def encoding(share: float) -> Rehearsal:
        at = Conditions(law, site.cluster.network(workers), site.work(strategy, replicas, share))
        return _known(site.task, strategy, workers, at, steps=steps, split=split)

    if split is not None:
        return encoding(_share_encoded(strategy, site, replicas))
    found, once = encoding(1.0), site.encoded(strategy)
    if once is None or found.sent_bytes_per_step > once / 2:
        return found
    return encoding(found.sent_bytes_per_step / once)  # the worker encodes in some of its steps only


def has_versions(strategy: Strategy) -> bool:
    """Return whether staleness counts versions of one model, rather than steps of replicas that differ."""
    return strategy.traits.delivery == "synchronous" or strategy.traits.server_optimizer


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
