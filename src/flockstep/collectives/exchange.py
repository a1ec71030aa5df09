"""Building blocks of collectives: binomial trees and a dissemination barrier."""

from __future__ import annotations

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.group import Group


def children(rank: int, workers: int, root: int = 0) -> list[int]:
    """Return a rank's children in the binomial tree on `root`: r+1, r+2, r+4, … counted from the root, nearest
    first.
    """
    place, found, distance = (rank - root) % workers, [], 1
    while place % (2 * distance) == 0 and place + distance < workers:
        found.append((root + place + distance) % workers)
        distance *= 2
    return found


def parent(rank: int, workers: int, root: int = 0) -> int:
    """Return the parent of a rank other than the root in the binomial tree: its place with the lowest set bit
    cleared.
    """
    place = (rank - root) % workers
    return (root + (place & (place - 1))) % workers


async def reduce_on_tree(me: Group, array: FlatArray, root: int) -> None:
    """Sum the arrays along a binomial tree: `array` becomes the sum over the rank's subtree, on the root the
    whole sum.
    """
    for child in children(me.rank, me.workers, root):
        array += await me.receive_array("reduce", child)
    if me.rank != root:
        me.send(parent(me.rank, me.workers, root), "reduce", array)


async def broadcast_on_tree(me: Group, array: FlatArray, root: int) -> None:
    """Replace `array` by the root's along a binomial tree; the largest subtree is served first."""
    if me.rank != root:
        await me.receive_array("broadcast", parent(me.rank, me.workers, root), array)
    me.send_all(reversed(children(me.rank, me.workers, root)), "broadcast", array)


async def signal_all(me: Group) -> None:
    """Return once every worker has called this (dissemination barrier: Hensgen, Finkel & Manber 1988): ⌈log2
    n⌉ rounds.
    """
    distance = 1
    while distance < me.workers:
        me.send((me.rank + distance) % me.workers, "barrier")
        source = (me.rank - distance) % me.workers
        await me.receive("barrier", source)
        me.require_all(source)
        distance *= 2
