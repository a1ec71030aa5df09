"""The contract of a workload, and what workloads share."""

from __future__ import annotations

import importlib
import zlib
from abc import abstractmethod
from typing import ClassVar

import numpy as np

from flockstep.errors import ConfigurationError, MissingDependency
from flockstep.expression import Component
from flockstep.frameworks.base import Job


class Workload(Component):
    """A built-in job; its fields are its sizes and its tuned settings.

    Data follow the workload's own fields alone, so that every seed trains on the same samples; only initial weights
    and the order of the samples follow the seed of the run.
    """

    noun: ClassVar[str] = "workload"

    @abstractmethod
    def job(self, seed: int) -> Job:
        """The job of the run `seed`; data and model are built when the job's functions are called.

        Raises:
            MissingDependency: a package that the workload needs is not installed.
        """


def require(module: str, extra: str, purpose: str) -> None:
    """Raise `MissingDependency`, naming the `extra` that installs it, unless `module` can be imported."""
    try:
        importlib.import_module(module)
    except ImportError:
        raise MissingDependency.of(module, extra, purpose) from None


def require_at_least(least: float, /, **values: float) -> None:
    """Raise `ConfigurationError` for the first of `values` that is below `least`."""
    for name, value in values.items():
        if not value >= least:
            raise ConfigurationError(f"{name} must be >= {least}, got {value}; give {least} or more")


def generator(purpose: str, seed: int) -> np.random.Generator:
    """A stream of random numbers for one purpose, unrelated to the streams of other purposes under the same seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()),)))
