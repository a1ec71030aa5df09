"""Building blocks of collectives: binomial trees and a dissemination barrier."""

from __future__ import annotations

from collections.abc import Sequence

from flockstep.arrays.namespace import copied
from flockstep.arrays.schema import FlatArray
from flockstep.collectives.group import Group
from flockstep.nodes import Hosts


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


def tree(hosts: Hosts, rank: int, root: int) -> tuple[int, list[int]]:
    """Return the parent of a rank (the rank itself for the root) and its children in the order in which their sums are
    added.

    The root and the first worker of every other host form a binomial tree between hosts. The workers of each host form
    another binomial tree, whose root is the host's member of the tree between hosts. So an array is sent to every other
    host only once.
    """
    leaders = [root if root in host else host[0] for host in hosts]
    number = next(i for i, host in enumerate(hosts) if rank in host)
    host, leader, count = hosts[number], leaders[number], len(leaders)
    place, top = host.index(rank), host.index(leader)
    below = [host[i] for i in children(place, len(host), top)]
    if rank != leader:
        return host[parent(place, len(host), top)], below
    first = leaders.index(root)
    above = rank if rank == root else leaders[parent(number, count, first)]
    return above, below + [leaders[i] for i in children(number, count, first)]


async def sum_shares(me: Group, array: FlatArray, shares: Sequence[slice]) -> FlatArray:
    """Sum the arrays of all workers such that each worker ends with the sum of its share of the elements.

    Every worker sends each other worker its share, and a share is summed in order of rank. The rest of `array` does not
    change.

    Args:
        me: this worker's member of the group.
        array: this worker's contribution, of shape (K,).
        shares: the share of each rank.

    Returns:
        The view of this worker's share of `array`, which holds the sum.
    """
    n, rank = me.workers, me.rank
    for hop in range(1, n):  # each worker begins with a different receiver
        to = (rank + hop) % n
        me.send(to, "scatter", array[shares[to]])
    view = array[shares[rank]]
    own = copied(view)
    for source in range(n):
        piece = own if source == rank else await me.receive_array("scatter", source)
        if source:
            view += piece
        else:
            view[:] = piece
    return view


async def reduce_on_tree(me: Group, array: FlatArray, root: int) -> None:
    """Sum the arrays along a `tree`: `array` becomes the sum over the rank's subtree; on the root, the sum over all
    workers.
    """
    above, below = tree(me.hosts, me.rank, root)
    for child in below:
        array += await me.receive_array("reduce", child)
    if me.rank != root:
        me.send(above, "reduce", array)


async def broadcast_on_tree(me: Group, array: FlatArray, root: int) -> None:
    """Replace `array` with the root's array along a `tree`; messages to other hosts and to large subtrees are sent
    first.
    """
    above, below = tree(me.hosts, me.rank, root)
    if me.rank != root:
        await me.receive_array("broadcast", above, array)
    me.send_all(reversed(below), "broadcast", array)


async def signal_all(me: Group) -> None:
    """Return once every worker has called this function; each call takes ⌈log2 n⌉ rounds (dissemination barrier:
    Hensgen, Finkel & Manber 1988).
    """
    distance = 1
    while distance < me.workers:
        me.send((me.rank + distance) % me.workers, "barrier")
        source = (me.rank - distance) % me.workers
        await me.receive("barrier", source)
        me.require_all(source)
        distance *= 2
