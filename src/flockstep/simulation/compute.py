"""Compute models: how long gradients take in virtual time. All durations are in seconds.

Each worker draws from a separate random stream: the k-th duration of worker r depends only on (seed, r, k), not on the
number of workers, on other workers or on the strategy. Strategies are therefore compared on the same draws (common
random numbers).
"""

from __future__ import annotations

import bisect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from flockstep.errors import CompositionError, ConfigurationError, require
from flockstep.expression import Component

_TAG = int.from_bytes(b"time", "big")  # separates these random streams from others of the same seed
_BLOCK = 32
_BASE, _SPELLS = 0, 1
FORWARD = 1 / 3
"""Fraction of a gradient's time that the forward pass takes, which is about half as long as the backward pass."""
_CLOSE = 1e-9
"""Rounding error with which a gradient counts as complete, as a share of its work."""

Draws = npt.NDArray[np.float64]


class Clock(ABC):
    """Computes the virtual times at which gradients end, for all workers of one run. Calls must be in order of time."""

    fixed: bool
    """Whether the end of a gradient is known when it begins, because gradients that begin later do not change it."""

    @abstractmethod
    def begin(self, rank: int, t: float, stretch: float = 1.0) -> None:
        """Start a gradient of worker `rank` at time `t`, in seconds; it takes `stretch` times the next duration drawn
        for the worker.
        """

    @abstractmethod
    def due(self, rank: int, t: float, share: float = 1.0) -> float:
        """Return the time at which the given share of the worker's last gradient is complete, provided that no other
        gradient begins after `t`.

        The share is counted from the end of the flat array. The result is at most `t` if the share is complete.
        """

    @abstractmethod
    def drop(self, rank: int, t: float) -> None:
        """Cancel the current gradient of worker `rank`."""

    @abstractmethod
    def handle(self, t: float, seconds: float) -> float:
        """Return the time at which a node has handled a message that needs a core for `seconds` from time `t` on.

        On shared cores, messages take precedence over gradients.
        """


def portion(share: float) -> float:
    """Return the fraction of a gradient's time after which the given share of the gradient, counted from the end of the
    flat array, is complete.
    """
    return FORWARD + (1 - FORWARD) * share


class ComputeModel(Component):
    """A model of how long the gradients of each worker take in virtual time."""

    noun: ClassVar[str] = "compute"

    @abstractmethod
    def stream(self, seed: int, rank: int) -> Iterator[float]:
        """Return an infinite iterator over the durations of one worker's gradients, in seconds."""

    @property
    def sharing(self) -> int | None:
        """Number of cores that the workers share; None if each worker has its own core."""
        return None

    @property
    def turns(self) -> bool:
        """Whether the gradients on a core run concurrently, by time slicing; otherwise they queue for the core."""
        return False

    @property
    def ranks(self) -> int:
        """Number of workers whose durations may differ in their mean; the durations of further workers are like those
        of these workers in turn.
        """
        return 1

    @property
    def spells(self) -> int:
        """Number of `SlowSpells` that this model contains, one inside the other; each draws from its own random
        stream.
        """
        return 0

    def start(self, workers: int, seed: int) -> Clock:
        """Create the clock of a run.

        Raises:
            ConfigurationError: `workers` is below 1, or `seed` is negative.
        """
        return self.clock(self.streams(workers, seed))

    def streams(self, workers: int, seed: int) -> list[Iterator[float]]:
        """Return the durations of each worker's gradients, in seconds.

        Raises:
            ConfigurationError: `workers` is below 1, or `seed` is negative.
        """
        require(workers >= 1, "workers", ">= 1", workers, "use 1 for a run without exchange")
        require(seed >= 0, "seed", ">= 0", seed, "use any whole number from 0")
        return [self.stream(seed, rank) for rank in range(workers)]

    def clock(self, streams: list[Iterator[float]]) -> Clock:
        """Create a clock for workers with these durations, which share cores as this model says."""
        if self.sharing is None:
            return _OwnCores(streams)
        return (_Turns if self.turns else _SharedCores)(streams, self.sharing)


class _Fixed(Clock):
    """A clock whose gradients end when they were said to end; one that is canceled keeps its core until then."""

    fixed = True

    def __init__(self, streams: list[Iterator[float]]) -> None:
        self._next = [stream.__next__ for stream in streams]
        self._began = [0.0] * len(streams)
        self._finish = [0.0] * len(streams)

    def due(self, rank: int, t: float, share: float = 1.0) -> float:
        finish = self._finish[rank]
        return finish if share >= 1 else self._began[rank] + (finish - self._began[rank]) * portion(share)

    def drop(self, rank: int, t: float) -> None:
        pass

    def handle(self, t: float, seconds: float) -> float:
        return t + seconds


class _OwnCores(_Fixed):
    def begin(self, rank: int, t: float, stretch: float = 1.0) -> None:
        self._began[rank] = t
        self._finish[rank] = t + self._next[rank]() * stretch


class _SharedCores(_Fixed):
    def __init__(self, streams: list[Iterator[float]], cores: int) -> None:
        super().__init__(streams)
        self._free = [0.0] * cores

    def begin(self, rank: int, t: float, stretch: float = 1.0) -> None:
        core = rank % len(self._free)
        self._began[rank] = t
        self._finish[rank] = self._free[core] = max(t, self._free[core]) + self._next[rank]() * stretch


class _Core:
    """One core: the gradients that run on it share it evenly, and messages go before gradients."""

    def __init__(self) -> None:
        self.work: dict[int, float] = {}
        """Worker → seconds that its running gradient takes on a core of its own."""
        self.left: dict[int, float] = {}
        """Worker → seconds that are left of these."""
        self._begins: list[float] = []
        self._ends: list[float] = []
        """Sorted times at which messages begin and end to be handled, without messages that ended before now."""
        self.now = 0.0

    def begin(self, rank: int, seconds: float) -> None:
        """Start a gradient of worker `rank`, which takes `seconds` on a core of its own."""
        self.work[rank] = self.left[rank] = seconds

    def idle(self, t: float, seconds: float) -> float:
        """Return the first time from `t` on at which the core handles no message for `seconds`."""
        first = bisect.bisect_right(self._ends, t)
        for begin, end in zip(self._begins[first:], self._ends[first:], strict=True):
            if begin >= t + seconds:
                break
            t = end
        return t

    def handle(self, begin: float, end: float) -> None:
        """Handle a message in a time without others."""
        bisect.insort(self._begins, begin)
        bisect.insort(self._ends, end)

    def flow(self, t: float) -> None:
        """Let the gradients run until time `t`."""
        while self.left and self.now < t:
            least = min(self.left.values())
            done = self._later(self.now, least * len(self.left))
            passed = least if done <= t else self._free(self.now, t) / len(self.left)
            self.now = min(done, t)
            rest = {rank: left - passed for rank, left in self.left.items()}
            self.left = {rank: left for rank, left in rest.items() if left > _CLOSE * self.work[rank]}
        self.now = max(self.now, t)
        ended = bisect.bisect_right(self._ends, self.now)
        del self._begins[:ended], self._ends[:ended]

    def end(self, rank: int, until: float) -> float:
        """Time at which `until` seconds are left of a worker's gradient, if no other gradient begins before."""
        wanted = self.left.get(rank, 0.0) - until
        if rank not in self.left or wanted <= _CLOSE * self.work[rank]:
            return self.now
        return self._later(self.now, sum(min(left, wanted) for left in self.left.values()))

    def _free(self, t: float, until: float) -> float:
        """Seconds between two times in which the core handles no message."""
        taken = zip(self._begins, self._ends, strict=True)
        return until - t - sum(max(0.0, min(end, until) - max(begin, t)) for begin, end in taken)

    def _later(self, at: float, work: float) -> float:
        """Time at which the core has computed gradients for `work` seconds since time `at`."""
        for begin, end in zip(self._begins, self._ends, strict=True):
            if begin - at >= work:
                break
            work -= max(0.0, begin - at)
            at = max(at, end)
        return at + work


class _Turns(Clock):
    """Each gradient runs on one core, from its beginning to its end, and shares it evenly with the others there.

    It begins on the core with the fewest gradients, if possible on the core of the worker's last gradient. A message
    that is handled takes a core from the gradients there.
    """

    fixed = False

    def __init__(self, streams: list[Iterator[float]], cores: int) -> None:
        self._next = [stream.__next__ for stream in streams]
        self._cores = [_Core() for _ in range(cores)]
        self._core = [self._cores[rank % cores] for rank in range(len(streams))]

    def begin(self, rank: int, t: float, stretch: float = 1.0) -> None:
        self._flow(t)
        least = min(len(core.left) for core in self._cores)
        if len(self._core[rank].left) > least:
            self._core[rank] = next(core for core in self._cores if len(core.left) == least)
        self._core[rank].begin(rank, self._next[rank]() * stretch)

    def due(self, rank: int, t: float, share: float = 1.0) -> float:
        self._flow(t)
        core = self._core[rank]
        return core.end(rank, 0.0 if share >= 1 else core.work.get(rank, 0.0) * (1 - portion(share)))

    def drop(self, rank: int, t: float) -> None:
        self._flow(t)
        self._core[rank].left.pop(rank, None)

    def handle(self, t: float, seconds: float) -> float:
        """Handle the message as soon as a core handles no other message, best on a core without gradients."""
        begin, _, core = min(
            ((core.idle(t, seconds), len(core.left), core) for core in self._cores), key=lambda one: one[:2]
        )
        core.handle(begin, begin + seconds)
        return begin + seconds

    def _flow(self, t: float) -> None:
        for core in self._cores:
            core.flow(t)


def _generator(seed: int, stream: int, rank: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence((seed, _TAG, stream, rank)))


def _above(value: float, least: float, what: str, way_out: str) -> None:
    require(least < value < math.inf, what, f"> {least:g} and finite", f"{value:g}", way_out)


@dataclass(frozen=True)
class ConstantTime(ComputeModel):
    """Every gradient takes `mean` seconds; with 0, computing takes no time."""

    mean: float

    def __post_init__(self) -> None:
        if not 0 <= self.mean < math.inf:
            raise ConfigurationError(
                f"mean duration must be >= 0 and finite, got {self.mean:g}; use 0 for gradients that take no time"
            )

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        return itertools.repeat(float(self.mean))


@dataclass(frozen=True)
class _Random(ComputeModel):
    """Independent draws from one distribution."""

    mean: float

    def __post_init__(self) -> None:
        _above(self.mean, 0, "mean duration", "use constant(0) for gradients that take no time")

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        random = _generator(seed, _BASE, rank)
        while True:  # blocks hide the cost of calling numpy
            yield from self._draw(random).tolist()

    @abstractmethod
    def _draw(self, random: np.random.Generator) -> Draws:
        """The next block of durations; the sequence must not depend on the sizes of the blocks."""


@dataclass(frozen=True)
class Normal(_Random):
    """Normally distributed durations with a standard deviation of `std` seconds, or of `cv` times the mean.

    A draw that is not positive is repeated (truncation from below), which raises the true mean above `mean`: by less
    than 0.1 % for cv <= 0.3, by 29 % for cv = 1.
    """

    std: float | None = None
    cv: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.std is None) == (self.cv is None):
            raise ConfigurationError(
                f"normal needs either std or cv, got {self.std} and {self.cv}; write normal({self.mean:g}, cv=0.1)"
            )
        if not 0 <= self.deviation < math.inf:
            raise ConfigurationError(
                f"standard deviation must be >= 0 and finite, got {self.deviation:g}; use 0 for no variation"
            )

    @property
    def deviation(self) -> float:
        """Standard deviation before truncation, in seconds."""
        return self.std if self.std is not None else (self.cv or 0.0) * self.mean

    def _draw(self, random: np.random.Generator) -> Draws:
        draws = random.normal(self.mean, self.deviation, _BLOCK)
        return draws[draws > 0]


@dataclass(frozen=True)
class Exponential(_Random):
    """Exponentially distributed durations: memoryless, with a standard deviation equal to the mean."""

    def _draw(self, random: np.random.Generator) -> Draws:
        return random.exponential(self.mean, _BLOCK)


@dataclass(frozen=True)
class Lognormal(_Random):
    """Durations whose logarithm is normal with standard deviation `sigma`; `mean` is the true mean, not the median."""

    sigma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _above(self.sigma, 0, "sigma", f"use constant({self.mean:g}) for no variation")

    def _draw(self, random: np.random.Generator) -> Draws:
        return random.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, _BLOCK)


@dataclass(frozen=True)
class Pareto(_Random):
    """Pareto durations: P(duration > x) = (least / x)^shape with least = mean (shape - 1) / shape.

    A smaller shape gives a heavier tail; at 2 and below the variance is infinite.
    """

    shape: float = 2.5

    def __post_init__(self) -> None:
        super().__post_init__()
        _above(self.shape, 1, "shape", "use 1.1 for a very heavy tail, because at 1 the mean is infinite")

    def _draw(self, random: np.random.Generator) -> Draws:
        least = self.mean * (self.shape - 1) / self.shape
        draws: Draws = least * (1 + random.pareto(self.shape, _BLOCK))
        return draws


@dataclass(frozen=True)
class Empirical(ComputeModel):
    """Durations that follow measured `quantiles`, from the smallest to the largest; each interval has the same
    probability.

    Between two quantiles the durations are uniformly distributed, so the mean is the mean of the intervals' midpoints.
    """

    quantiles: tuple[float, ...]

    def __post_init__(self) -> None:
        known = self.quantiles
        if len(known) < 2 or any(a > b for a, b in itertools.pairwise(known)):
            raise ConfigurationError(
                f"quantiles must be two or more durations in ascending order, got {known}; write (0.01, 0.012, 0.02)"
            )
        _above(known[0], 0, "the least quantile", "gradients take time; use constant(0) for gradients without duration")
        _above(known[-1], 0, "the largest quantile", "leave out gradients that never ended")

    @property
    def mean(self) -> float:
        """Mean of the measured durations, in seconds."""
        inner = sum(self.quantiles) - (self.quantiles[0] + self.quantiles[-1]) / 2
        return inner / (len(self.quantiles) - 1)

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        random = _generator(seed, _BASE, rank)
        while True:
            places = random.random(_BLOCK) * (len(self.quantiles) - 1)
            yield from np.interp(places, np.arange(len(self.quantiles)), self.quantiles).tolist()


@dataclass(frozen=True)
class Wrapper(ComputeModel):
    """Base of compute models that change the durations of another model, with the same random draws."""

    base: ComputeModel

    @property
    def sharing(self) -> int | None:
        return self.base.sharing

    @property
    def turns(self) -> bool:
        return self.base.turns

    @property
    def ranks(self) -> int:
        return self.base.ranks

    @property
    def spells(self) -> int:
        return self.base.spells


@dataclass(frozen=True)
class Speeds(Wrapper):
    """Worker r takes `factors[r mod n]` times as long as under the model `base`, n being the number of factors."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.factors:
            raise ConfigurationError(
                "factors must contain at least one number, got (); use (1, 2) if every other worker is slow"
            )
        for factor in self.factors:
            _above(factor, 0, "a speed's factor", "2 stands for twice as slow")

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        """Return the durations of `base` in seconds, multiplied by the factor of the worker's rank."""
        return map(float(self.factors[rank % len(self.factors)]).__mul__, self.base.stream(seed, rank))


@dataclass(frozen=True)
class SlowSpells(Wrapper):
    """Each worker is slow from time to time, for `length` successive steps, like a machine that also runs other
    programs.

    Outside a slow spell, each step begins a spell with probability `probability`; the `length` steps of a spell take
    `factor` times as long. The share of slow steps is p L / (p L + 1 - p).
    """

    probability: float
    factor: float
    length: int

    def __post_init__(self) -> None:
        if not 0 <= self.probability <= 1:
            raise ConfigurationError(
                f"probability must be in [0, 1], got {self.probability:g}; use 0.01 for 1 step in 100"
            )
        _above(self.factor, 0, "a spell's factor", "10 stands for ten times as slow")
        require(self.length >= 1, "length", ">= 1 step", self.length, "use 1 for single slow steps")

    @property
    def spells(self) -> int:
        """Number of `SlowSpells` in this model, including this one."""
        return self.base.spells + 1

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        """Return the durations of `base` in seconds; those within slow spells are multiplied by `factor`."""
        random = _generator(seed, _SPELLS + self.base.spells, rank)
        durations, left = self.base.stream(seed, rank), 0
        while True:
            for begins in (random.random(_BLOCK) < self.probability).tolist():
                left = left - 1 if left else 0
                if begins and not left:
                    left = self.length
                yield next(durations) * self.factor if left else next(durations)


@dataclass(frozen=True)
class SharedCores(Wrapper):
    """Worker r computes on core r mod `cores`; a core computes one gradient at a time, in order of arrival.

    With `turns`, a gradient begins on the core with the fewest gradients, and the gradients on a core share the core
    evenly, as under an operating system.
    """

    cores: int
    turns: bool = False

    def __post_init__(self) -> None:
        require(self.cores >= 1, "cores", ">= 1", self.cores, "leave shared_cores out if every worker has its own core")
        if self.base.sharing is not None:
            raise CompositionError(f"the workers of {self.base} share cores already; use shared_cores only once")

    @property
    def sharing(self) -> int | None:
        return self.cores

    def stream(self, seed: int, rank: int) -> Iterator[float]:
        """Return the durations of `base` in seconds, without the time spent waiting for a core."""
        return self.base.stream(seed, rank)
