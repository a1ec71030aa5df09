"""Finds where to cut a chain of layers, so that the slowest part takes the least time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from flockstep.errors import ConfigurationError

Number = int | float


def balanced(seconds: Sequence[Number], nbytes: Sequence[Number], parts: int) -> list[int]:
    """Return the first unit of each part of the best cut of a chain into `parts` parts of at least one unit.

    The best cut has the least time of its slowest part, and, of several such cuts, the least memory of its largest
    part; both are found by dynamic programming over the ends of the parts (Narayanan et al. 2019, section 3.1, without
    replication).

    Args:
        seconds: time of each unit, in any unit of time.
        nbytes: memory of each unit, in bytes.
        parts: number of parts.

    Raises:
        ConfigurationError: there are fewer units than parts.
    """
    if not 1 <= parts <= len(seconds):
        raise ConfigurationError(
            f"the number of parts must be >= 1 and <= {len(seconds)}, the number of units in the chain, got {parts}; "
            "use at most one part per unit"
        )
    slowest, _ = _bottleneck(seconds, [0] * len(seconds), parts, math.inf)
    return _bottleneck(nbytes, seconds, parts, slowest)[1]


def _bottleneck(
    loads: Sequence[Number], limited: Sequence[Number], parts: int, limit: float
) -> tuple[float, list[int]]:
    """Return the least largest load of a part, and the parts' first units, with sums of `limited` within `limit`."""
    units = len(loads)
    load, bound = [0.0, *accumulate(map(float, loads))], [0.0, *accumulate(map(float, limited))]
    most = limit * (1 + 1e-9)
    best = [0.0] + [math.inf] * units
    """Least largest load of the first parts if they end before unit i."""
    starts: list[list[int]] = []
    for _ in range(parts):
        after, begin = [math.inf] * (units + 1), [0] * (units + 1)
        for end in range(1, units + 1):
            for start in range(end):
                if bound[end] - bound[start] > most:
                    continue
                worst = max(best[start], load[end] - load[start])
                if worst < after[end]:
                    after[end], begin[end] = worst, start
        best = after
        starts.append(begin)
    cut, end = [], units
    for begin in reversed(starts):
        end = begin[end]
        cut.append(end)
    return best[units], cut[::-1]
