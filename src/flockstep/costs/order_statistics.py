"""How long the k-th fastest of n workers takes: means of order statistics of the laws of compute time.

Exact for constant times, for exponential ones (Rényi 1953: E of the k-th of n is mean · (H_n - H_(n-k))) and for Pareto
ones; by quadrature over the distribution functions otherwise, E X_(k) = ∫ P(fewer than k are done by x) dx, which also
holds where workers differ in speed. Seconds throughout. Draws of different workers are independent.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import singledispatch

import numpy as np
import numpy.typing as npt

from flockstep.errors import ConfigurationError
from flockstep.simulation.compute import (
    ComputeModel,
    Constant,
    Empirical,
    Exponential,
    Lognormal,
    Normal,
    Pareto,
    SharedCores,
    SlowSpells,
    Speeds,
)
from flockstep.simulation.law import mean_of

Grid = npt.NDArray[np.float64]
Spectrum = npt.NDArray[np.complex128]

_POINTS = 1 << 14
_BINS = 1 << 15
_MANY, _FEWER_BINS = 2000, 1 << 13
_FAR = 1e30  # where the integral over a Pareto tail is cut off, in means


def harmonic(n: int) -> float:
    """H_n = 1 + 1/2 + ... + 1/n."""
    return math.fsum(1 / i for i in range(1, n + 1))


@functools.lru_cache(maxsize=1024)
def mean(law: ComputeModel, workers: int = 1) -> float:
    """Mean seconds of a gradient, over all workers."""
    return math.fsum(mean_of_worker(law, rank) for rank in range(workers)) / workers


def slowest(law: ComputeModel, workers: int, steps: int = 1) -> float:
    """Mean of the maximum over the workers: what a barrier after `steps` gradients each waits for."""
    return fastest(law, workers, workers, steps)


@functools.lru_cache(maxsize=1024)
def fastest(law: ComputeModel, k: int, workers: int, steps: int = 1) -> float:
    """Mean of the k-th smallest over the workers of the time that `steps` gradients take.

    Raises:
        ConfigurationError: k is not between 1 and the number of workers, or the law has no such form.
    """
    if not 1 <= k <= workers or steps < 1:
        raise ConfigurationError(
            f"the k-th of n workers needs 1 <= k <= n and >= 1 step, got {k} of {workers} after {steps}; choose others"
        )
    if isinstance(law, SharedCores):
        return _on_shared_cores(law, k, workers, steps)
    if steps == 1 and isinstance(law, (Constant, Exponential, Pareto)):
        return _exact(law, k, workers)
    return _integral([_law(law, rank, steps) for rank in range(workers)], k)


def at_least(law: ComputeModel, seconds: float, rank: int = 0) -> float:
    """Mean of the longer of a gradient of that worker and a given time."""
    floor = _Law(seconds, seconds, (seconds,), ((1.0, 1.0, Constant(seconds)),))
    return _integral([_law(law, rank, 1), floor], 2) if seconds else mean_of_worker(law, rank)


def memoryless(law: ComputeModel) -> bool:
    """Whether the time still needed never depends on the time spent."""
    return memoryless(law.base) if isinstance(law, Speeds) else isinstance(law, Exponential)


def certain(law: ComputeModel) -> bool:
    """Whether each worker always takes the same time."""
    return certain(law.base) if isinstance(law, (Speeds, SharedCores)) else isinstance(law, Constant)


def _exact(law: Constant | Exponential | Pareto, k: int, n: int) -> float:
    """Constant; Exponential: mean (H_n - H_(n-k)); Pareto: least · n!/(n-k)! · Γ(n-k+1-1/a) / Γ(n+1-1/a)."""
    match law:
        case Constant():
            return law.mean
        case Exponential():
            return law.mean * (harmonic(n) - harmonic(n - k))
    least, power = law.mean * (law.shape - 1) / law.shape, 1 / law.shape
    logs = math.lgamma(n + 1) - math.lgamma(n - k + 1) + math.lgamma(n - k + 1 - power) - math.lgamma(n + 1 - power)
    return least * math.exp(logs)


@dataclass(frozen=True, eq=False)
class _Law:
    """A distribution: its function on a grid, and where all but nothing of it lies; `jumps`: where it is not smooth."""

    low: float
    high: float
    jumps: tuple[float, ...]
    parts: tuple[tuple[float, float, ComputeModel], ...]
    """(share, factor, law): a mixture of laws, each stretched by its factor."""
    sums: tuple[Grid, Grid] | None = None
    """Tabulated distribution function, for sums."""
    known: dict[bytes, Grid] = field(default_factory=dict)
    """The function on the last grid, which other numbers of workers ask for too."""

    def on(self, grid: Grid) -> Grid:
        """The same on a grid, kept in [0, 1]; remembered."""
        key = grid.tobytes()
        if key not in self.known:
            self.known.clear()
            self.known[key] = np.clip(self.below(grid), 0.0, 1.0)
        return self.known[key]

    def below(self, x: Grid) -> Grid:
        """P(X <= x)."""
        if self.sums is not None:
            return np.interp(x, *self.sums, left=0.0, right=1.0)
        total = np.zeros_like(x)
        for share, factor, law in self.parts:
            total += share * _distribution(law, x / factor)
        return total


@singledispatch
def _distribution(law: ComputeModel, x: Grid) -> Grid:
    raise ConfigurationError(f"{law} has no distribution function here; run the rehearsal instead")


@_distribution.register
def _(law: Constant, x: Grid) -> Grid:
    return (x >= law.mean * (1 - 1e-15)).astype(float)


@_distribution.register
def _(law: Exponential, x: Grid) -> Grid:
    return -np.expm1(-x / law.mean)


@_distribution.register
def _(law: Normal, x: Grid) -> Grid:
    if not law.deviation:
        return (x >= law.mean * (1 - 1e-15)).astype(float)
    none = _phi(np.array([-law.mean / law.deviation]))[0]
    within: Grid = np.clip((_phi((x - law.mean) / law.deviation) - none) / (1 - none), 0.0, 1.0)
    return within


@_distribution.register
def _(law: Lognormal, x: Grid) -> Grid:
    return _phi((np.log(x / law.mean) + law.sigma**2 / 2) / law.sigma)


@_distribution.register
def _(law: Pareto, x: Grid) -> Grid:
    least = law.mean * (law.shape - 1) / law.shape
    return 1 - (least / np.maximum(x, least)) ** law.shape


@_distribution.register
def _(law: Empirical, x: Grid) -> Grid:
    known = np.array(law.quantiles)
    return np.interp(x, known, np.linspace(0.0, 1.0, len(known)), left=0.0, right=1.0)


def _phi(z: Grid) -> Grid:
    """The standard normal distribution function: cubic between points, by their values and slopes, within 1e-13."""
    values, slopes = _phi_at_points()
    width = 2 * _TAIL / (len(values) - 1)
    place = (np.clip(z, -_TAIL, _TAIL) + _TAIL) / width
    left = np.minimum(place.astype(int), len(values) - 2)
    t = place - left
    rise = values[left + 1] - values[left]
    bend = (1 - t) * (width * slopes[left] - rise) - t * (width * slopes[left + 1] - rise)
    found: Grid = values[left] + t * rise + t * (1 - t) * bend
    return found


@functools.cache
def _phi_at_points() -> tuple[Grid, Grid]:
    """Values and slopes, from -_TAIL to _TAIL; numpy has no error function."""
    z = np.linspace(-_TAIL, _TAIL, 8193)
    values = np.fromiter((0.5 * math.erfc(-value / math.sqrt(2)) for value in z), float, len(z))
    return values, np.exp(-z * z / 2) / math.sqrt(2 * math.pi)


_TAIL = 10.0
"""Standard deviations beyond which nothing is."""


def _span(law: ComputeModel) -> tuple[float, float]:
    """Where all but nothing of a base law lies: below the first, P < 1e-15; above the second, nothing that counts."""
    match law:
        case Normal():
            return max(law.mean * 1e-12, law.mean - 9 * law.deviation), law.mean + 9 * law.deviation
        case Lognormal():
            middle = math.log(law.mean) - law.sigma**2 / 2
            return math.exp(middle - 9 * law.sigma), math.exp(middle + (9 + law.sigma) * law.sigma)
        case Pareto():
            return law.mean * (law.shape - 1) / law.shape, law.mean * _FAR
        case Exponential():
            return law.mean * 1e-12, law.mean * 50
        case Empirical():
            return law.quantiles[0], law.quantiles[-1]
        case Constant():
            return law.mean, law.mean
    raise ConfigurationError(f"the range of {law} is not known here; run the rehearsal instead")


def _parts(law: ComputeModel, rank: int) -> list[tuple[float, float, ComputeModel]]:
    """What a worker's gradient times are a mixture of, in the long run."""
    if isinstance(law, Speeds):
        by = law.factors[rank % len(law.factors)]
        return [(share, factor * by, base) for share, factor, base in _parts(law.base, rank)]
    if isinstance(law, SlowSpells):
        p, length = law.probability, law.length
        slow = p * length / (p * length + 1 - p)
        spread = ((1 - slow, 1.0), (slow, law.factor))
        return [(s * a, f * b, base) for s, f, base in _parts(law.base, rank) for a, b in spread if a]
    if isinstance(law, SharedCores):
        return _parts(law.base, rank)
    return [(1.0, 1.0, law)]


def mean_of_worker(law: ComputeModel, rank: int) -> float:
    """Mean seconds of a gradient of one worker, waiting for a core not counted."""
    return math.fsum(share * factor * mean_of(base) for share, factor, base in _parts(law, rank))


def _law(law: ComputeModel, rank: int, steps: int) -> _Law:
    if isinstance(law, Speeds) and not isinstance(law.base, Speeds):  # workers of one speed share a law
        return _cached_law(Speeds(law.base, (law.factors[rank % len(law.factors)],)), 0, steps)
    return _cached_law(law, rank if isinstance(law, Speeds) else 0, steps)


@functools.lru_cache(maxsize=256)
def _cached_law(law: ComputeModel, rank: int, steps: int) -> _Law:
    parts = tuple(_parts(law, rank))
    spans = [(factor * low, factor * high) for _, factor, base in parts for low, high in (_span(base),)]
    low, high = min(span[0] for span in spans), max(span[1] for span in spans)
    bases = [base for _, _, base in parts]
    # constants jump where their span begins and ends; these others have a corner at the beginning
    jumps = [
        span[0] for span, base in zip(spans, bases, strict=True) if isinstance(base, (Constant, Pareto, Empirical))
    ]
    one = _Law(low, high, tuple(jumps), parts)
    return one if steps == 1 else _sum(one, steps, mean_of_worker(law, rank), _spell(law, rank))


Parts = list[tuple[float, float, ComputeModel]]


@dataclass(frozen=True)
class _Spell:
    """Slow spells: that one begins has this probability at a gradient; it lasts so many."""

    probability: float
    length: int
    calm: Parts
    """What a gradient outside of spells is a mixture of."""
    slow: Parts

    def spectrum(self, calm: Spectrum, slow: Spectrum, steps: int) -> Spectrum:
        """Of the sum of consecutive gradients, from those of single ones: a Markov chain of what is left of a spell."""
        p, length = self.probability, self.length
        share = p * length / (p * length + 1 - p)
        left = np.repeat([[1 - share + 0j], *[[share / length + 0j]] * length], len(calm), axis=1)
        for _ in range(steps):
            ended = left[0] + left[1]
            left[1:-1] = left[2:] * slow
            left[0] = (1 - p) * ended * calm
            left[-1] = p * ended * slow
        total: Spectrum = left.sum(axis=0)
        return total


def _spell(law: ComputeModel, rank: int) -> _Spell | None:
    """The spells of a worker, if it has any; those within spells count as independent from gradient to gradient."""
    factor = 1.0
    while isinstance(law, (Speeds, SharedCores)):
        factor *= law.factors[rank % len(law.factors)] if isinstance(law, Speeds) else 1.0
        law = law.base
    if not isinstance(law, SlowSpells):
        return None
    calm = [(share, factor * by, base) for share, by, base in _parts(law.base, rank)]
    return _Spell(law.probability, law.length, calm, [(share, law.factor * by, base) for share, by, base in calm])


def _sum(one: _Law, steps: int, average: float, spell: _Spell | None) -> _Law:
    """The law of the sum of so many consecutive draws: the convolution, on a grid."""
    if one.low == one.high:
        return _Law(steps * one.low, steps * one.low, (steps * one.low,), ((1.0, 1.0, Constant(steps * one.low)),))
    far = max(200.0, 4.0 * steps) * average + 20 * (one.low if one.low < average else 0)
    top = min(steps * one.high, steps * average + far)
    bins = _BINS if spell is None or steps * spell.length <= _MANY else _FEWER_BINS
    width = top / bins
    edges: Grid = (np.arange(bins + 1) + 0.5).astype(np.float64) * width  # bin i holds what lies around i · width

    def spectrum(law: _Law) -> Spectrum:
        masses = np.diff(law.below(edges), prepend=0.0)[:-1]
        masses[0] = law.below(edges[:1])[0]
        return np.fft.rfft(masses, 2 * bins)

    if spell is None:
        whole = spectrum(one) ** steps
    else:
        calm, slow = (spectrum(_Law(one.low, one.high, (), tuple(parts))) for parts in (spell.calm, spell.slow))
        whole = spell.spectrum(calm, slow, steps)
    total = np.clip(np.fft.irfft(whole, 2 * bins)[:bins], 0.0, None)
    below: Grid = np.minimum(np.cumsum(total), 1.0).astype(np.float64)
    return _Law(width / 2, top, (), (), (edges[:-1], below))


def _integral(laws: Sequence[_Law], k: int) -> float:
    """∫ P(fewer than k of the workers are done by x) dx."""
    low, high = min(law.low for law in laws), max(law.high for law in laws)
    if low == high == 0:
        return 0.0
    low = low or high * 1e-12
    jumps = np.array([jump for law in set(laws) for jump in law.jumps if jump > 0])
    tabled = [law.sums[0] for law in set(laws) if law.sums is not None]
    grid = np.concatenate([np.geomspace(low, high, 2 if low == high else _POINTS), jumps * (1 - 1e-12), jumps, *tabled])
    grid = np.unique(grid)
    return float(grid[0] + np.trapezoid(_fewer(laws, k, grid), grid))


def _fewer(laws: Sequence[_Law], k: int, grid: Grid) -> Grid:
    """P(fewer than k are done by x): of independent workers with laws of their own (Poisson-binomial)."""
    below = {law: law.on(grid) for law in set(laws)}
    if k == len(laws):
        done = np.ones_like(grid)
        for law in laws:
            done *= below[law]
        return 1 - done
    others = len(laws) + 1 - k
    fewest = min(k, others)  # of many workers, nearly all: those that are not done are counted
    counts = np.zeros((fewest, len(grid)))  # counts[j]: exactly j are done, or not done, j < fewest
    counts[0] = 1.0
    for law in laws:
        p = below[law] if k <= others else 1 - below[law]
        counts[1:] = counts[1:] * (1 - p) + counts[:-1] * p
        counts[0] *= 1 - p
    total: Grid = counts.sum(axis=0)
    return total if k <= others else 1 - total


def _on_shared_cores(law: SharedCores, k: int, workers: int, steps: int) -> float:
    """A core serves its workers one after the other; of random times only the last to end has a form."""
    busy = [workers // law.cores + (core < workers % law.cores) for core in range(min(law.cores, workers))]
    if isinstance(law.base, Constant):
        ends = sorted((steps - 1) * queue + place + 1 for queue in busy for place in range(queue))
        return law.base.mean * ends[k - 1]
    one_speed = isinstance(law.base, Speeds) and len(set(law.base.factors)) == 1
    if k < workers or (isinstance(law.base, Speeds) and not one_speed):
        raise ConfigurationError(
            f"the {k}-th of {workers} workers has no closed form with {law}; run the rehearsal, or wait for everyone"
        )
    return _integral([_law(law.base, 0, queue * steps) for queue in busy], len(busy))
