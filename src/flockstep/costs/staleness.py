"""By how many versions updates are late: laws and bounds."""

from __future__ import annotations

import math

from flockstep.errors import ConfigurationError


def mean_staleness(workers: int, gradients: int = 1) -> float:
    """(λ-1)/c: mean staleness where a step takes `gradients` (c) of λ workers that wait for nobody.

    In the long run, whatever the law of compute times: between two reads of a worker, each other one pushes once in
    the mean (Zhang et al. 2016, section 3, who find c = ⌊λ/n⌋, staleness n).
    """
    _require(workers, gradients)
    return (workers - 1) / gradients


def staleness_of_fast(shares: list[float], rank: int) -> float:
    """Mean staleness of one worker's updates where workers take these shares of all updates: (1 - share) / share."""
    return (1 - shares[rank]) / shares[rank]


def geometric(workers: int, staleness: int) -> float:
    """P(staleness = t) = (1/λ) (1 - 1/λ)^t for memoryless gradient times of equal rate, and free messages.

    Each update is anyone's with the same probability, whatever happened before (Mitliagkas et al. 2016, theorem 1 with
    its assumption of exponential times).
    """
    _require(workers, 1)
    return (1 - 1 / workers) ** staleness / workers


def geometric_quantile(workers: int, probability: float) -> int:
    """The least t with P(staleness <= t) >= probability, for memoryless workers."""
    _require(workers, 1)
    if not 0 <= probability < 1:
        raise ConfigurationError(f"probability must be in [0, 1), got {probability}; 0.99 is usual")
    if workers == 1 or probability == 0:
        return 0
    return max(0, math.ceil(math.log1p(-probability) / math.log1p(-1 / workers) - 1e-12) - 1)


def ssp_bound(workers: int, slack: int) -> int:
    """Versions by which an update can be late under stale synchronous parallel with bound s; 0 for s = 0.

    A read at clock c sees all up to timestamp c - s - 1, and its gradient is applied before any of timestamp above
    c + s: of each other worker 2 s + 1, and s of one's own (from the conditions of Ho et al. 2013, section 2).
    """
    _require(workers, 1)
    return (2 * slack + 1) * (workers - 1) + slack if slack else 0


def bounded_delay_bound(workers: int, delay: int) -> int:
    """Versions by which an update can be late under bounded delay tau, applied on arrival; 0 for tau = 0.

    Between read and application each other worker, which is at most tau clocks behind at the read and tau ahead at the
    end, pushes at most 2 tau + 1 times (from the condition of Li et al. 2014, section 3.4).
    """
    _require(workers, 1)
    return (2 * delay + 1) * (workers - 1) if delay else 0


def _require(workers: int, gradients: int) -> None:
    if workers < 1 or gradients < 1:
        raise ConfigurationError(
            f"staleness is that of >= 1 workers and >= 1 gradients a step, got {workers} and {gradients}; use 1 and 1"
        )
