"""How algorithms for 2^k workers serve any number: the others fold their array into a partner's, and get it back."""

from __future__ import annotations

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.costs import doublings
from flockstep.collectives.group import Group


async def fold(me: Group, array: FlatArray) -> int:
    """2^⌊log2 n⌋, the number of workers that go on; rank r of them has added the array of rank r + 2^⌊log2 n⌋."""
    power = 1 << doublings(me.workers)
    if me.rank >= power:
        me.send(me.rank - power, "fold", array)
    elif me.rank + power < me.workers:
        array += await me.receive_array("fold", me.rank + power)
    return power


async def unfold(me: Group, array: FlatArray) -> None:
    """Give the result to those that had folded."""
    power = 1 << doublings(me.workers)
    if me.rank >= power:
        await me.receive_array("unfold", me.rank - power, array)
    elif me.rank + power < me.workers:
        me.send(me.rank + power, "unfold", array)


def is_power(workers: int) -> bool:
    """Whether nobody has to fold."""
    return workers & (workers - 1) == 0


def sent_in_folds(workers: int, size: int, rank: int) -> int:
    """Elements that a rank sends while folding and unfolding."""
    power = 1 << doublings(workers)
    return size if rank >= power or rank + power < workers else 0


def rounds_with_folds(workers: int, phases: int) -> int:
    """Rounds of so many phases of log2 each, with those of folding and unfolding."""
    return phases * doublings(workers) + 2 * (not is_power(workers))
