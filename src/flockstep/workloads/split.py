"""Splits, which distribute the training samples over the workers."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.errors import CompositionError, ConfigurationError, require
from flockstep.expression import Component
from flockstep.frameworks.base import Indices
from flockstep.workloads.base import generator

Labels = npt.NDArray[np.int64]


class Split(Component):
    """The interface of a split, which assigns every training sample to exactly one worker, and at least one sample to
    every worker.
    """

    noun: ClassVar[str] = "split"

    @abstractmethod
    def assign(self, labels: Labels | None, size: int, workers: int, seed: int) -> list[Indices]:
        """Return the indices of each worker's samples, out of range(size). Equal arguments give equal indices.

        Args:
            labels: the class of every sample, of shape (size,), or None if there are no classes.
            size: number of samples.
            workers: number of workers over which the samples are divided.
            seed: the run's seed.

        Raises:
            ConfigurationError: there are fewer samples than workers, or the length of `labels` is not `size`.
                CompositionError: the split needs classes, but the samples have none.
        """


@dataclass(frozen=True)
class Iid(Split):
    """A random permutation of the samples, cut into equal parts, so that all workers have the same distribution."""

    def assign(self, labels: Labels | None, size: int, workers: int, seed: int) -> list[Indices]:
        _check(labels, size, workers)
        return np.array_split(generator("split", seed).permutation(size), workers)


@dataclass(frozen=True)
class ByLabel(Split):
    """Samples sorted by class and cut into equal parts, so that every worker has few classes (McMahan et al. 2017).

    With `classes_per_worker`, each worker gets samples of exactly this many classes, drawn at random so that each class
    is drawn equally often, as far as the numbers allow; the workers that share a class share its samples equally.
    """

    classes_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.classes_per_worker is not None and self.classes_per_worker < 1:
            raise ConfigurationError(
                f"classes_per_worker must be >= 1, got {self.classes_per_worker}; leave it out to divide the classes "
                "equally"
            )

    def assign(self, labels: Labels | None, size: int, workers: int, seed: int) -> list[Indices]:
        labels = _checked_labels("by_label", labels, size, workers)
        rng = generator("split", seed)
        groups = _by_class(labels, rng)
        if self.classes_per_worker is None:
            return np.array_split(np.concatenate(groups), workers)
        classes, each = len(groups), self.classes_per_worker
        if not math.ceil(classes / workers) <= each <= classes:
            raise ConfigurationError(
                f"classes_per_worker must be in [{math.ceil(classes / workers)}, {classes}] for {classes} classes on "
                f"{workers} workers, got {each}; leave it out to divide the classes equally"
            )
        # Class → the workers that share it: classes in random order are assigned in turn.
        order, holders = rng.permutation(classes), [list[int]() for _ in groups]
        for turn in range(workers * each):
            holders[order[turn % classes]].append(turn // each)
        shards: list[list[Indices]] = [[] for _ in range(workers)]
        for label, (group, mine) in enumerate(zip(groups, holders, strict=True)):
            if len(group) < len(mine):
                raise ConfigurationError(
                    f"class number {label} has only {len(group)} samples for {len(mine)} workers; lower "
                    "classes_per_worker or the number of workers"
                )
            for worker, part in zip(mine, np.array_split(group, len(mine)), strict=True):
                shards[worker].append(part)
        return [np.concatenate(parts) for parts in shards]


@dataclass(frozen=True)
class Dirichlet(Split):
    """Each class is divided among the workers in random proportions drawn from Dirichlet(alpha) (Yurochkin et al.
    2019).

    A small alpha gives each worker few classes and shards of unequal size, a large alpha approaches `iid`. A worker
    that would get no sample gets a sample from the largest shard.
    """

    alpha: float = 0.5

    def __post_init__(self) -> None:
        require(1e-3 <= self.alpha <= 1e6, "alpha", "in [0.001, 1000000]", self.alpha, "use iid for equal shards")

    def assign(self, labels: Labels | None, size: int, workers: int, seed: int) -> list[Indices]:
        labels = _checked_labels("dirichlet", labels, size, workers)
        rng = generator("split", seed)
        shards: list[list[Indices]] = [[] for _ in range(workers)]
        for group in _by_class(labels, rng):
            shares = np.cumsum(rng.dirichlet(np.full(workers, self.alpha)))
            cuts = np.rint(shares[:-1] / shares[-1] * len(group)).astype(np.int64)
            for shard, part in zip(shards, np.split(group, cuts), strict=True):
                shard.append(part)
        whole = [np.concatenate(parts) for parts in shards]
        for worker, own in enumerate(whole):
            if len(own) == 0:
                donor = max(range(workers), key=lambda other: len(whole[other]))
                whole[worker], whole[donor] = whole[donor][-1:], whole[donor][:-1]
        return whole


def _by_class(labels: Labels, rng: np.random.Generator) -> list[Indices]:
    """Return the indices of each class that occurs, in random order within the class."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)


def _check(labels: Labels | None, size: int, workers: int) -> None:
    require(workers >= 1, "workers", ">= 1", workers, "use 1 for a single process")
    if workers > size:
        raise ConfigurationError(f"{size} samples are too few for {workers} workers; use at most {size} workers")
    if labels is not None and labels.shape != (size,):
        raise ConfigurationError(f"labels must have the shape ({size},), got {labels.shape}; give one label per sample")


def _checked_labels(name: str, labels: Labels | None, size: int, workers: int) -> Labels:
    if labels is None:
        raise CompositionError(
            f"the split {name} needs a class for every sample, which this job does not have; use split iid"
        )
    _check(labels, size, workers)
    return labels
