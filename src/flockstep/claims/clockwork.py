"""Runs of which only times and staleness matter: gradients that cost nothing, and no messages kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.virtual import Simulation
from flockstep.frameworks.base import Data, Job
from flockstep.frameworks.numpy import Model, Views
from flockstep.records.events import Event, Update
from flockstep.testing.strategies import Watched, run_strategy


class Unjudged(Model):
    """A model of which only the parameters matter: nobody asks what it says, or for its loss."""

    dtype = "float64"

    def outputs(self, params: Views, x: FlatArray) -> FlatArray:
        """The parameters."""
        return params["w"]

    def loss(self, params: Views, outputs: FlatArray, y: FlatArray) -> float:
        """None to speak of."""
        return 0.0


def unjudged_job(model: Callable[[], Unjudged], x: FlatArray, batch: int = 1) -> Job:
    """To train it on the samples x, with a learning rate of 1."""

    def data() -> Data:
        return Data(x, np.zeros(len(x)), x[:1], np.zeros(1))

    return Job(model, data, "sgd(lr=1)", metric=lambda outputs, targets: 0.0, batch=batch)


class Still(Unjudged):
    """One parameter that never moves."""

    dtype = "float32"

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """A single number."""
        return {"w": (1,)}

    def initial(self, random: np.random.Generator) -> Views:
        """0."""
        return {"w": np.zeros(1)}

    def gradients(self, params: Views, x: FlatArray, y: FlatArray, out: Views) -> FlatArray:
        """0."""
        out["w"][...] = 0
        return np.zeros(len(x))


def still_job() -> Job:
    """A job of one parameter, one sample a worker and no gradient."""
    return unjudged_job(Still, np.zeros((1024, 1)))


class Updates(Watched):
    """A simulation that keeps the updates alone, of runs with hundreds of thousands of messages."""

    def note(self, event: Event) -> None:
        """Keep an update."""
        if isinstance(event, Update):
            self.log.append(event)

    send = Simulation.send


@dataclass(frozen=True, eq=False)
class Trace:
    """The gradients that took effect, in order; arrays of equal length."""

    t: npt.NDArray[np.float64]
    """When, in seconds."""
    rank: npt.NDArray[np.int64]
    """Whose."""
    staleness: npt.NDArray[np.int64]
    """How many updates late."""

    def until_first_end(self, steps: int) -> Trace:
        """Only up to where a worker's `steps`-th and last gradient took effect: all workers take part until then."""
        ends = [np.flatnonzero(self.rank == rank)[steps - 1 : steps] for rank in np.unique(self.rank)]
        first = int(np.concatenate(ends).min()) + 1
        return Trace(self.t[:first], self.rank[:first], self.staleness[:first])


def trace_of(updates: list[Update]) -> Trace:
    """The trace of a record's updates."""
    columns = [(update.t, update.source, update.staleness) for update in updates]
    t, rank, staleness = (np.array(column) for column in zip(*columns, strict=True))
    return Trace(t, rank, staleness)


def timed(
    strategy: str, workers: int, steps: int, compute: str, simulation: type[Updates] = Updates
) -> tuple[Trace, Updates]:
    """Run a strategy with free messages; its trace, and the simulation as it ended."""
    run = run_strategy(
        strategy, workers, steps, job=still_job(), compute=compute, network="ideal", simulation=simulation
    )
    assert isinstance(run.simulation, Updates)
    return trace_of(run.of(Update)), run.simulation


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + … + 1/n."""
    return sum(1 / k for k in range(1, n + 1))
