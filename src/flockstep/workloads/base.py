"""The interface of a workload, and functions that workloads share."""

from __future__ import annotations

import importlib
import zlib
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from flockstep.errors import MissingDependency, require
from flockstep.expression import Component
from flockstep.frameworks.base import Job


class Workload(Component):
    """A built-in training job, whose fields are the sizes of the problem and tuned settings.

    The data depend only on the workload's fields, so that every seed trains on the same samples; initial weights and
    the order of the samples depend on the seed of the run.
    """

    noun: ClassVar[str] = "workload"

    @abstractmethod
    def job(self, seed: int) -> Job:
        """Return the job for the seed of a run. Data and model are built when the job's functions are called.

        Raises:
            MissingDependency: a package that the workload needs is not installed.
        """


def tuned_job(workload: Any, name: str, **more: Any) -> Job:
    """Return a job with the batch, epochs, optimizer and target of a built-in workload; `more` are its other fields."""
    tuned = {field: getattr(workload, field) for field in ("batch", "epochs", "optimizer", "target")}
    return Job(name=name, **tuned, **more)


def require_module(module: str, extra: str, purpose: str) -> None:
    """Raise `MissingDependency`, which names the `extra` to install, if `module` cannot be imported."""
    try:
        importlib.import_module(module)
    except ImportError:
        raise MissingDependency.of(module, extra, purpose) from None


def require_at_least(least: float, /, **values: float) -> None:
    """Raise `ConfigurationError` if one of `values` is below `least`."""
    for name, value in values.items():
        require(value >= least, name, f">= {least}", value, f"use {least} or more")


def generator(purpose: str, seed: int) -> np.random.Generator:
    """Return a random generator for one purpose, independent of those for other purposes at this seed."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()),)))
