"""Reads the steps of a recorded run, and repeats the durations of the run's gradients in virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from flockstep.errors import ConfigurationError
from flockstep.records.config import RunConfig
from flockstep.records.events import Event, StepEvent
from flockstep.records.folder import RunFolder
from flockstep.simulation.compute import ComputeModel

PARTS = ("compute_seconds", "wait_seconds", "comm_seconds")
"""Names of the parts of a step's duration in a record."""
MOST = 1e12
"""Number of seconds, or of bytes, of a step above which a record counts as invalid."""


@dataclass(frozen=True)
class RecordedTime(ComputeModel):
    """Worker r's n-th gradient takes as long as in the record of a run in folder `run`, real or in virtual time.

    After the last recorded step of a worker its steps are repeated from the first, so that a worker that was slow for a
    while is slow for as many steps again. If there are more workers than in the record, worker r repeats the steps of
    worker r mod n, n being the number of recorded workers. Records of `flockstep launch` serve as well.
    """

    run: str

    def __post_init__(self) -> None:
        _ = self.rows  # a simulation may replace the folder, and a folder without a run is refused here

    @cached_property
    def rows(self) -> tuple[tuple[float, ...], ...]:
        """Seconds of each worker's gradients, from the first one on."""
        config = usable_config(self.run)
        steps = steps_by_worker(RunFolder(self.run).read_events(), config.workers, self.run)
        shortest(steps, self.run)
        return tuple(tuple(one.compute_seconds for one in mine) for mine in steps)

    @property
    def ranks(self) -> int:
        """Number of workers in the record."""
        return len(self.rows)

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        """Return an iterator over the recorded durations of one worker, in seconds, repeated without end."""
        return itertools.cycle(self.rows[rank % len(self.rows)])


def usable_config(run: str) -> RunConfig:
    """Return the configuration of the run whose record is to describe virtual time.

    Raises:
        ConfigurationError: the folder holds no run, the run failed, or its workers computed parts of gradients.
    """
    record = RunFolder(run)
    config, summary = record.read_config(), record.read_summary()
    if summary.status == "failed":
        raise ConfigurationError(
            f"{run} is the record of a failed run, whose last steps may show the failure ({summary.error}); name the "
            "record of a run that ended, or repeat the run"
        )
    if config.partition is not None or config.processes_of_replica > 1:
        raise ConfigurationError(
            f"{run} is the record of a run whose workers hold parts of a replica, and only whole gradients are "
            "repeated in virtual time; name the record of a run without partition and --replica-size"
        )
    return config


def steps_by_worker(events: Sequence[Event], workers: int, where: str = "the record") -> list[list[StepEvent]]:
    """Return the steps of every worker, in order.

    Raises:
        ConfigurationError: there are fewer events than workers, steps of an unknown worker, or steps with impossible
            durations or bytes.
    """
    if workers > len(events):
        raise ConfigurationError(
            f"{where} must contain at least three steps of every worker, got {len(events)} events of {workers} "
            "workers; repeat the run with more steps, or correct workers in config.toml"
        )
    steps: list[list[StepEvent]] = [[] for _ in range(workers)]
    for event in events:
        if not isinstance(event, StepEvent):
            continue
        if not 0 <= event.rank < workers:
            raise ConfigurationError(
                f"the rank of a step in {where} must be >= 0 and < {workers}, the number of workers, got "
                f"{event.rank}; correct workers in config.toml, or repeat the run"
            )
        for name in (*PARTS, "sent_bytes"):
            if not 0 <= getattr(event, name) <= MOST:
                raise ConfigurationError(
                    f"{name} of a step must be >= 0 and <= {MOST:g}, got {getattr(event, name)} of worker "
                    f"{event.rank} in {where}; repeat the run"
                )
        steps[event.rank].append(event)
    return steps


def shortest(steps: Sequence[Sequence[StepEvent]], where: str) -> int:
    """Return the smallest number of steps of a worker.

    Raises:
        ConfigurationError: a worker has fewer than three steps.
    """
    length = min(map(len, steps))
    if length < 3:
        raise ConfigurationError(
            f"{where} must contain at least three steps of every worker, got {length}; repeat the run with more steps"
        )
    return length
