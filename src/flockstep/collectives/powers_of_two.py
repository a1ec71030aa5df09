"""Folding, with which an algorithm for 2^k workers serves any number of workers.

Each worker beyond 2^k first adds its array to the array of a partner, and receives the result from the partner at the
end.
"""

from __future__ import annotations

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.costs import doublings
from flockstep.collectives.group import Group


async def fold(me: Group, array: FlatArray) -> int:
    """Fold the workers of rank p = 2^⌊log2 n⌋ and above: rank r < p adds the array of rank r + p to its own. Return p,
    the number of workers that continue.
    """
    power = 1 << doublings(me.workers)
    if me.rank >= power:
        me.send(me.rank - power, "fold", array)
    elif me.rank + power < me.workers:
        array += await me.receive_array("fold", me.rank + power)
    return power


async def unfold(me: Group, array: FlatArray) -> None:
    """Send the result from each worker that continued to the worker that has folded into it."""
    power = 1 << doublings(me.workers)
    if me.rank >= power:
        await me.receive_array("unfold", me.rank - power, array)
    elif me.rank + power < me.workers:
        me.send(me.rank + power, "unfold", array)


def is_power(workers: int) -> bool:
    """Return whether the number of workers is a power of two, in which case no worker folds."""
    return workers & (workers - 1) == 0


def sent_in_folds(workers: int, size: int, rank: int) -> int:
    """Return the number of elements that a rank sends while folding and unfolding."""
    power = 1 << doublings(workers)
    return size if rank >= power or rank + power < workers else 0


def rounds_with_folds(workers: int, phases: int) -> int:
    """Return the number of rounds in `phases` phases of ⌊log2 n⌋ rounds each, plus the rounds of folding and
    unfolding.
    """
    return phases * doublings(workers) + 2 * (not is_power(workers))
