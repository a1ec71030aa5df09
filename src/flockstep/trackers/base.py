"""The interface of an experiment tracker."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Protocol

from flockstep.errors import MissingDependency
from flockstep.expression import Component


@dataclass(frozen=True)
class Point:
    """The values of several curves at one time."""

    group: str
    """First part of the names of the curves, such as `worker-3` or `evaluation`."""
    values: Mapping[str, float]
    """Name of a curve, without its group → value."""
    step: int
    """Position of the point on the horizontal axis. Within a group, the position never decreases."""
    seconds: float
    """Seconds from the beginning of the run to the point."""

    def named(self) -> dict[str, float]:
        """Return the values by the whole names of their curves, which include the group."""
        return {f"{self.group}/{name}": value for name, value in self.values.items()}


class TrackedRun(Protocol):
    """A run in an experiment tracker."""

    def log(self, points: Sequence[Point], /) -> object:
        """Add points to the curves, and write them to the tracker."""

    def end(self, failed: bool, /) -> object:
        """Mark the run as ended in the tracker."""


class ExperimentTracker(Component):
    """The interface of an experiment tracker, with the settings that say where the tracker stores runs."""

    noun: ClassVar[str] = "tracker"

    @property
    def place(self) -> str:
        """Text for the user that says where the tracker stores runs, and which command shows them."""
        return str(self)

    @abstractmethod
    def begin(self, name: str, settings: Mapping[str, str], started: float) -> TrackedRun:
        """Create a run in the tracker.

        Args:
            name: name of the run.
            settings: the run's configuration.
            started: time at which the run began, in seconds since 1970.

        Raises:
            ConfigurationError: the place already holds the curves of another run.
            MissingDependency: the tracker's package is not installed.
        """


def package(module: str) -> Any:
    """Import a module of a tracker's package, which has the name of the module's first part."""
    name = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingDependency(
            f"tracker {name} needs a package that is not installed; install the package with: pip install {name}"
        ) from None
