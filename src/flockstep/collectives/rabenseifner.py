"""All-reduce by recursive halving and doubling, for any number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray, slices
from flockstep.collectives import costs
from flockstep.collectives.base import Collective
from flockstep.collectives.group import Group
from flockstep.collectives.powers_of_two import fold, is_power, rounds_with_folds, sent_in_folds, unfold
from flockstep.collectives.recursive_doubling import gathered_by_doubling


@dataclass(frozen=True)
class Rabenseifner(Collective):
    """Reduce-scatter by recursive halving, all-gather by recursive doubling (Rabenseifner 2004).

    In each of log2 n rounds, partners, at first adjacent ranks, exchange halves of the part that they still hold; then
    the rounds run in reverse. Each worker sends 2(n-1)/n K elements in 2 log2 n messages. The sums equal those of
    recursive doubling in every bit. If n is not a power of two, workers fold as in recursive doubling (the paper avoids
    part of this cost).
    """

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        await self.reduce_scatter(me, array)
        for partner, kept, given in reversed(list(_halvings(me.workers, len(array), me.rank))):
            me.send(partner, "double", array[kept])
            await me.receive_array("double", partner, array[given])
        await unfold(me, array)

    async def reduce_scatter(self, me: Group, array: FlatArray) -> tuple[slice, FlatArray]:
        """Leave each of 2^k workers with a chunk of the sum; workers that have folded receive no chunk."""
        await fold(me, array)
        for partner, kept, given in _halvings(me.workers, len(array), me.rank):
            me.send(partner, "halve", array[given])
            array[kept] += await me.receive_array("halve", partner)
        part = self.share(me.workers, len(array), me.rank)
        return part, array[part]

    def share(self, workers: int, size: int, rank: int) -> slice:
        """Return the chunk whose number is the rank with its bits reversed; an empty slice for ranks that fold."""
        whole = slice(0, size if rank < 1 << costs.doublings(workers) else 0)
        return [whole, *(kept for _, kept, _ in _halvings(workers, size, rank))][-1]

    async def all_gather(self, me: Group, array: FlatArray) -> list[FlatArray]:
        """Gather the arrays of 2^k workers in k messages each; for any other number of workers, gather along a ring."""
        return await gathered_by_doubling(me, array) if is_power(me.workers) else await super().all_gather(me, array)

    def cost(self, workers: int, nbytes: float, link: costs.LinkModel) -> float:
        """Return the seconds of 2 log2 P messages in two phases, each of which sends (P-1)/P of the array; folding
        takes additional time.
        """
        return costs.halving_doubling(workers, nbytes, link)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Return the number of elements sent: the given half in each round of halving, the kept half in each round of
        doubling, and folded arrays.
        """
        halves = _halvings(workers, size, rank)
        inner = sum(int(given.stop - given.start + kept.stop - kept.start) for _, kept, given in halves)
        return inner + sent_in_folds(workers, size, rank)

    def rounds(self, workers: int) -> int:
        """Return the number of rounds among P workers: 2 ⌊log2 P⌋, and two more if P is not a power of two."""
        return rounds_with_folds(workers, 2)


def _halvings(workers: int, size: int, rank: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield for each round the partner, the half that the rank keeps and the half that it sends; nothing if it
    folds.
    """
    power = 1 << costs.doublings(workers)
    bounds = [part.start for part in slices(size, power)] + [size]
    first, last, distance = 0, power, 1  # chunks first..last-1 are still held
    while distance < power and rank < power:
        middle = (first + last) // 2
        lower, upper = slice(bounds[first], bounds[middle]), slice(bounds[middle], bounds[last])
        if rank & distance:
            yield rank ^ distance, upper, lower
            first = middle
        else:
            yield rank ^ distance, lower, upper
            last = middle
        distance *= 2
