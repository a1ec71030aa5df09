"""All-reduce by recursive doubling (butterfly), for any number of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flockstep.arrays.namespace import namespace
from flockstep.arrays.schema import FlatArray
from flockstep.collectives import costs
from flockstep.collectives.base import Collective
from flockstep.collectives.group import Group
from flockstep.collectives.powers_of_two import fold, is_power, rounds_with_folds, sent_in_folds, unfold
from flockstep.errors import ProtocolError
from flockstep.messages import Message, node_name


@dataclass(frozen=True)
class RecursiveDoubling(Collective):
    """All-reduce in log2(n) rounds of whole arrays (Thakur, Rabenseifner & Gropp 2005).

    If n is not a power of two, the last n - 2^floor(log2 n) workers first add their array to a partner's array, and
    receive the result from the partner at the end. Addition commutes, so partners compute the same bits.
    """

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        power = await fold(me, array)
        if me.rank < power:
            distance = 1
            while distance < power:
                partner = me.rank ^ distance
                me.send(partner, "double", array)
                array += await me.receive_array("double", partner)
                distance *= 2
        await unfold(me, array)

    async def all_gather(self, me: Group, array: FlatArray) -> list[FlatArray]:
        """Gather the arrays of 2^k workers in k messages each, of 1, 2, 4, … arrays; for any other number of workers,
        gather along a ring.
        """
        return await gathered_by_doubling(me, array) if is_power(me.workers) else await super().all_gather(me, array)

    def cost(self, workers: int, nbytes: float, link: costs.LinkModel) -> float:
        """Return the seconds of log2 P messages of the whole array; folding takes additional time."""
        return costs.butterfly(workers, nbytes, link)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Return the number of elements sent: K log2 P, plus the elements of folded arrays."""
        inner = costs.doublings(workers) * size if rank < 1 << costs.doublings(workers) else 0
        return inner + sent_in_folds(workers, size, rank)

    def rounds(self, workers: int) -> int:
        """Return the number of rounds among P workers: ⌊log2 P⌋, and two more if P is not a power of two."""
        return rounds_with_folds(workers, 1)


async def gathered_by_doubling(me: Group, array: FlatArray) -> list[FlatArray]:
    """Return the arrays of all 2^k workers, in order of rank; each worker sends k messages.

    The arrays may differ in size, but not in dtype.
    """
    held = {me.rank: array}
    distance = 1
    while distance < me.workers:
        partner = me.rank ^ distance
        ranks = sorted(held)
        sizes = {str(rank): len(held[rank]) for rank in ranks}
        me.send(partner, "double", namespace(array).concatenate([held[rank] for rank in ranks]), sizes)
        message = await me.receive("double", partner)
        me.require_all(partner)
        start = 0
        for rank, size in _sizes(message, [rank ^ distance for rank in ranks]).items():
            held[rank] = message.payload[start : start + size]
            start += size
        distance *= 2
    return [held[rank] for rank in range(me.workers)]


def _sizes(message: Message, ranks: Sequence[int]) -> dict[int, int]:
    """Return rank → size of the rank's array in a message that holds the arrays of `ranks`.

    Raises:
        ProtocolError: the message does not give the sizes, or they do not match its length.
    """
    found = {rank: message.note.get(str(rank), -1) for rank in ranks}
    sizes = {rank: size for rank, size in found.items() if isinstance(size, int) and size >= 0}
    if len(sizes) < len(ranks) or sum(sizes.values()) != len(message.payload):
        raise ProtocolError(
            f"{node_name(message.source)} sent {len(message.payload)} elements as the arrays of ranks "
            f"{', '.join(map(str, ranks))}, but announced the sizes {found}"
        )
    return sizes
