"""A schedule applied to the steps of a run."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from flockstep.schedules.base import ROUNDING, Extent, Schedule


@dataclass(frozen=True)
class Timetable:
    """Learning rate and batch size of every step of a worker, as functions of the step alone, so that a restart needs
    no state.

    `lr` is the job's learning rate, and `batch` the job's batch size per worker. The schedule lasts `epochs` passes of
    all workers together over `train_size` samples.
    """

    schedule: Schedule
    lr: float
    batch: int
    workers: int
    train_size: int
    epochs: float

    @classmethod
    def over_steps(
        cls, schedule: Schedule, lr: float, batch: int, workers: int, train_size: int, steps: int
    ) -> Timetable:
        """Return the timetable for `steps` steps of each worker."""
        stages = _stages(schedule, batch)
        ends = [*[share for share, _ in stages[1:]], 1.0]
        per_sample = sum((end - share) / size for (share, size), end in zip(stages, ends, strict=True))
        return cls(schedule, lr, batch, workers, train_size, steps / per_sample * workers / train_size)

    @property
    def steps(self) -> int:
        """Number of steps of each worker until the schedule ends; fewer if the batch size grows."""
        return self._starts[-1]

    @property
    def grows(self) -> bool:
        """Whether the batch size grows during the run."""
        return len({batch for _, batch in self._stages}) > 1

    def lr_at(self, step: int) -> float:
        """Return a worker's learning rate for the step that follows its first `step` steps."""
        return self.lr * self.schedule.factor(self.epoch_at(step), Extent(self.epochs, self.workers))

    def batch_at(self, step: int) -> int:
        """Return the number of samples in a worker's batch in the step that follows its first `step` steps."""
        return self._stages[self._stage_at(step)][1]

    def samples_at(self, step: int) -> int:
        """Return the number of samples that a worker uses in its first `step` steps."""
        now = self._stage_at(step)
        ends = [*self._starts[1 : now + 1], step]
        pieces = zip(self._starts[: now + 1], ends, self._stages[: now + 1], strict=True)
        return sum((end - start) * batch for start, end, (_, batch) in pieces)

    def epoch_at(self, step: int) -> float:
        """Return the number of epochs, passes of all workers together over the data, that the first `step` steps of
        each worker make.
        """
        return self.samples_at(step) * self.workers / self.train_size

    @cached_property
    def _stages(self) -> list[tuple[float, int]]:
        return _stages(self.schedule, self.batch)

    @cached_property
    def _starts(self) -> list[int]:
        """The first step of every stage, and the first step after the last stage."""
        starts, seen, whole = [0], 0, self.epochs * self.train_size / self.workers
        ends = [*[share for share, _ in self._stages[1:]], 1.0]
        for (_, batch), end in zip(self._stages, ends, strict=True):
            length = max(0, math.ceil((end * whole - seen) / batch - ROUNDING))
            starts.append(starts[-1] + length)
            seen += length * batch
        return starts

    def _stage_at(self, step: int) -> int:
        return max(0, bisect_right(self._starts[:-1], step) - 1)


def _stages(schedule: Schedule, batch: int) -> list[tuple[float, int]]:
    """Return pairs (fraction of the run's samples, batch size from there on)."""
    return [(share, max(1, round(batch * factor))) for share, factor in schedule.stages]
