"""Runs from which only times and staleness are read: gradients cost no computation, and messages are not recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views
from flockstep.records.events import Event, UpdateEvent
from flockstep.runtime.virtual import Simulation
from flockstep.testing.strategies import Watched, run_strategy


class Unjudged(Model):
    """Base class of models that have parameters and gradients, but are never evaluated."""

    dtype = "float64"

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        return params["w"]

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        return 0.0


def unjudged_job(model: Callable[[], Unjudged], x: FlatArray, batch: int = 1) -> Job:
    """Return a job that trains `model` on the samples x with a learning rate of 1 and is never evaluated."""

    def data() -> Data:
        return Data(x, np.zeros(len(x)), x[:1], np.zeros(1))

    return Job(model, data, "sgd(lr=1)", metric=lambda outputs, targets: 0.0, batch=batch)


class Still(Unjudged):
    """A model with one parameter and a gradient that is always zero."""

    dtype = "float32"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"w": (1,)}

    def initial(self, random: np.random.Generator) -> Views:
        return {"w": np.zeros(1)}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        out["w"][...] = 0
        return np.zeros(len(x))


def still_job() -> Job:
    """Return a job with one parameter, gradients of zero and one sample per batch."""
    return unjudged_job(Still, np.zeros((1024, 1)))


class Updates(Watched):
    """A simulation that stores only update events, for runs with hundreds of thousands of messages."""

    def note(self, event: Event) -> None:
        if isinstance(event, UpdateEvent):
            self.log.append(event)

    send = Simulation.send


@dataclass(frozen=True, eq=False)
class Trace:
    """The gradients that were applied, in order of time; every field has one element per gradient."""

    t: npt.NDArray[np.float64]
    """Virtual seconds at which each gradient was applied."""
    rank: npt.NDArray[np.int64]
    """Rank of the worker that computed each gradient."""
    staleness: npt.NDArray[np.int64]
    """Staleness of each gradient: the number of updates since the worker read the parameters."""

    def until_first_end(self, steps: int) -> Trace:
        """Return the part of the trace in which all workers take part.

        This part ends as soon as all `steps` gradients of some worker have been applied.
        """
        ends = [np.flatnonzero(self.rank == rank)[steps - 1 : steps] for rank in np.unique(self.rank)]
        first = int(np.concatenate(ends).min()) + 1
        return Trace(self.t[:first], self.rank[:first], self.staleness[:first])


def trace_of(updates: list[UpdateEvent]) -> Trace:
    """Return the trace of the gradients in a run's update events."""
    columns = [(update.seconds, update.source, update.staleness) for update in updates]
    t, rank, staleness = (np.array(column) for column in zip(*columns, strict=True))
    return Trace(t, rank, staleness)


def timed(
    strategy: str, workers: int, steps: int, compute: str, simulation: type[Updates] = Updates
) -> tuple[Trace, Updates]:
    """Run a strategy with messages that take no time; return the trace of its gradients and the finished simulation."""
    run = run_strategy(
        strategy, workers, steps, job=still_job(), compute=compute, network="ideal", simulation=simulation
    )
    assert isinstance(run.simulation, Updates)
    return trace_of(run.of(UpdateEvent)), run.simulation


def harmonic(n: int) -> float:
    """Return the harmonic number H_n = 1 + 1/2 + … + 1/n."""
    return sum(1 / k for k in range(1, n + 1))
