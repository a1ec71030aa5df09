"""What share of the time workers compute: periodic averaging, and exchange that overlaps with backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

from flockstep.errors import ConfigurationError

ONE_TO_FIVE = 5 / 6
"""Communication for a fifth of the time of computation (Langer et al. 2020, section 3.3.2)."""


def periodic(period: float, compute: float, communication: float) -> float:
    """τ T_c / (τ T_c + T_comm): steps of `compute` seconds, `communication` seconds after every `period` of them."""
    busy = period * compute
    return busy / (busy + communication) if busy + communication else 1.0


def period_for(utilisation: float, compute: float, communication: float) -> float:
    """τ with which workers compute for that share of the time: u/(1-u) · T_comm/T_c; not rounded.

    Raises:
        ConfigurationError: the share is not in [0, 1), or gradients take no time.
    """
    if not 0 <= utilisation < 1 or not compute > 0 or communication < 0:
        raise ConfigurationError(
            f"a period is found for a utilisation in [0, 1), seconds > 0 a gradient and >= 0 of communication, got "
            f"{utilisation}, {compute} and {communication}; use 0.833 for five parts of computing to one"
        )
    return utilisation / (1 - utilisation) * communication / compute


def whole_period_for(utilisation: float, compute: float, communication: float) -> int:
    """The least whole τ with at least that utilisation."""
    return max(1, math.ceil(period_for(utilisation, compute, communication) * (1 - 1e-12)))


def overlapped(compute: float, communication: float) -> float:
    """Seconds of a step whose communication goes on all the while: the longer of the two."""
    return max(compute, communication)


def bucketed(ready: Sequence[float], seconds: Sequence[float]) -> float:
    """When the last bucket is done, where each is ready at a time, and they are exchanged one after the other.

    That is where the card is always busy with the one under way; latencies of buckets that overlap are hidden, so it is
    the most that it takes (Li et al. 2020, section 3.2.3, for the idea).
    """
    end = 0.0
    for begins, takes in zip(ready, seconds, strict=True):
        end = max(end, begins) + takes
    return end
