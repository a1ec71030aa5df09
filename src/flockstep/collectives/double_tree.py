"""All-reduce along two trees at once, half of the array along each."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray, slices
from flockstep.collectives import costs
from flockstep.collectives.base import Collective
from flockstep.collectives.group import Group
from flockstep.errors import require


@dataclass(frozen=True)
class TreeNode:
    """Parent and children of a rank in a tree; a missing parent or child is None."""

    parent: int | None
    left: int | None
    right: int | None

    @property
    def children(self) -> list[int]:
        """The ranks of the node's children, at most two."""
        return [child for child in (self.left, self.right) if child is not None]


def trees(workers: int, rank: int) -> tuple[TreeNode, TreeNode]:
    """Return the node of a rank in each of the two trees.

    The first tree is the in-order binary tree over the ranks, in which even ranks are leaves. The second tree is the
    first tree with all ranks shifted by one: odd ranks are its leaves, and also rank 0 if the number of workers is odd.
    """
    return _place(workers, rank, 0), _place(workers, rank, 1)


@dataclass(frozen=True)
class DoubleTree(Collective):
    """Double binary tree (Sanders, Speck & Träff 2009; NCCL 2.4: Jeaugey 2019): half of the array along each tree.

    Each half of the array is reduced to the root of its own tree and broadcast from there, in `chunks` pipelined
    chunks. An inner rank of one tree is a leaf of the other, so that no network card carries more than K elements up
    and K down in total. An all-reduce takes about 2 log2 n rounds. A parent adds the sum of its left subtree to its own
    array, then the sum of its right subtree. (In NCCL's second tree an inner rank of the first is inner again if n is
    odd.)
    """

    chunks: int = 8

    def __post_init__(self) -> None:
        require(self.chunks >= 1, "chunks", ">= 1", self.chunks, "8 is usual")

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        places = trees(me.workers, me.rank)
        halves = slices(len(array), 2)
        cut = [[array[half][part] for part in slices(half.stop - half.start, self.chunks)] for half in halves]
        work = sorted(zip(places, cut, strict=True), key=lambda tree: len(tree[0].children))
        for place, chunks in work:  # as a leaf first, because a leaf does not wait
            for chunk in chunks:
                for child in place.children:
                    chunk += await me.receive_array("up", child)
                if place.parent is not None:
                    me.send(place.parent, "up", chunk)
        for place, chunks in reversed(work):
            for chunk in chunks:
                if place.parent is not None:
                    await me.receive_array("down", place.parent, chunk)
                me.send_all(place.children, "down", chunk)

    def cost(self, workers: int, nbytes: float, link: costs.LinkModel) -> float:
        """Return the seconds of an all-reduce of m bytes on P workers, for latency L and G seconds per byte: 2 (d L +
        (c + d - 1) m G / c) with c chunks per half and trees of depth d = ⌊log2 P⌋; half the bytes if P = 2.

        This is a full pipeline: each network card passes two chunks of m / 2c per turn, and each level adds a turn. In
        virtual time an all-reduce takes 3/4 to 5/4 of this cost, depending on how chunks overlap.
        """
        if workers == 1:
            return 0.0
        depth, piece = costs.doublings(workers), link.occupied(nbytes / (2 * self.chunks))
        return 2 * (depth * link.latency + min(2, workers - 1) * (self.chunks + depth - 1) * piece)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Return the number of elements sent: in both trees, K/2 to the parent and K/2 to each child."""
        halves = [part.stop - part.start for part in slices(size, 2)]
        links = [len(place.children) + (place.parent is not None) for place in trees(workers, rank)]
        return sum(half * count for half, count in zip(halves, links, strict=True))

    def rounds(self, workers: int) -> int:
        """Return the number of rounds among P workers: 2 ⌊log2 P⌋, the depth of the trees up and down."""
        return 2 * costs.doublings(workers)


def _place(workers: int, rank: int, shift: int) -> TreeNode:
    """Return a rank's node in the in-order tree over ranks shift, shift+1, …, shift-1."""
    wanted = (rank - shift) % workers
    first, size, parent = 0, workers, None
    while True:
        half = 1 << costs.doublings(size)  # the left subtree is complete: half - 1 ranks
        root = first + half - 1
        if root == wanted:
            left = _root(first, half - 1)
            right = _root(root + 1, size - half)
            return TreeNode(*(None if at is None else (at + shift) % workers for at in (parent, left, right)))
        parent = root
        first, size = (first, half - 1) if wanted < root else (root + 1, size - half)


def _root(first: int, size: int) -> int | None:
    """Return the root of the in-order tree over `size` ranks from `first` on; None if `size` is 0."""
    return first + (1 << costs.doublings(size)) - 1 if size else None
