"""Ring all-reduce: reduce-scatter, then all-gather, around a ring."""

from __future__ import annotations

from dataclasses import dataclass

from flockstep.arrays.schema import FlatArray, slices
from flockstep.collectives import costs
from flockstep.collectives.base import Collective
from flockstep.collectives.group import Group
from flockstep.links.shared_group import ring_pieces


@dataclass(frozen=True)
class Ring(Collective):
    """All-reduce on a ring (Patarasuk & Yuan 2009; Baidu 2017): 2(n-1) chunks of about K/n elements per worker.

    Each worker sends 2(n-1) chunks of about K/n elements, 2(n-1)K elements over all workers; a chunk of more than 1 MiB
    is sent in several messages. Chunk c is summed once, in the order c, c+1, …, c-1 of ranks, so that all workers end
    with the same bits. A divisor is applied to each chunk before it is gathered, so that every element is divided only
    once. Processes on one host that share memory add in the same order in shared memory, which is counted as the same
    bytes and messages.
    """

    async def divided_sum(self, me: Group, array: FlatArray, divisor: int) -> None:
        if me.shared.all_reduce(array, divisor):
            return
        n, rank = me.workers, me.rank
        chunks = [array[part] for part in slices(len(array), n)]
        if n > 1 and (pieces := ring_pieces(chunks[0].nbytes)) > 1:
            await _in_pieces(me, chunks, pieces, divisor)
            return
        await _reduce_scatter(me, chunks)
        if divisor != 1:
            chunks[(rank + 1) % n] /= divisor
        before, after = (rank - 1) % n, (rank + 1) % n
        for hop in range(n - 1):
            me.send(after, "gather", chunks[(rank - hop + 1) % n])
            await me.receive_array("gather", before, chunks[(rank - hop) % n])

    async def reduce_scatter(self, me: Group, array: FlatArray) -> tuple[slice, FlatArray]:
        """Sum around the ring; after n-1 messages of about K/n elements, worker i holds the summed chunk i+1."""
        parts = slices(len(array), me.workers)
        chunks = [array[part] for part in parts]
        await _reduce_scatter(me, chunks)
        mine = (me.rank + 1) % me.workers
        return parts[mine], chunks[mine]

    def share(self, workers: int, size: int, rank: int) -> slice:
        """Return the slice of the chunk that this rank holds after a reduce-scatter: chunk rank + 1, modulo the number
        of workers.
        """
        return slices(size, workers)[(rank + 1) % workers]

    def cost(self, workers: int, nbytes: float, link: costs.LinkModel) -> float:
        """Return the seconds of 2 (P-1) messages, each with 1/P of the array."""
        return costs.pipeline(workers, nbytes, link)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Return the number of elements sent: 2K minus the two chunks that the rank never sends; 0 for a single
        worker.
        """
        chunks = [part.stop - part.start for part in slices(size, workers)]
        spared = chunks[(rank + 1) % workers] + chunks[(rank + 2) % workers]
        return 2 * size - spared if workers > 1 else 0

    def rounds(self, workers: int) -> int:
        """Return the number of rounds among P workers: P-1 of reduce-scatter and P-1 of all-gather."""
        return 2 * (workers - 1)


async def _reduce_scatter(me: Group, chunks: list[FlatArray]) -> None:
    """Sum the chunks; worker i ends with the sum of chunk i+1."""
    n, rank = me.workers, me.rank
    before, after = (rank - 1) % n, (rank + 1) % n
    for hop in range(n - 1):
        me.send(after, "reduce", chunks[(rank - hop) % n])
        chunk = chunks[(rank - hop - 1) % n]
        chunk += await me.receive_array("reduce", before)


async def _in_pieces(me: Group, chunks: list[FlatArray], pieces: int, divisor: int) -> None:
    """Run the ring with chunks cut into pieces, two of which are in transit at a time; divide each piece while it is in
    the processor's cache.
    """
    n, rank, last = me.workers, me.rank, me.workers - 1
    parts = [[chunk[part] for part in slices(len(chunk), pieces)] for chunk in chunks]
    pairs = [range(pieces)[pair] for pair in slices(pieces, pieces // 2)]
    steps = [(piece, hop) for pair in pairs for hop in range(2 * last) for piece in pair]
    for at in range(len(steps) + 2):
        if at >= 2:  # a step sends what arrived in the previous step of its piece, at least two steps earlier
            piece, hop = steps[at - 2]
            part = parts[(rank - hop - 1) % n][piece]
            if hop < last:
                part += await me.receive_array("reduce", (rank - 1) % n)
                if divisor != 1 and hop == last - 1:
                    part /= divisor
            else:
                await me.receive_array("gather", (rank - 1) % n, part)
        if at < len(steps):
            piece, hop = steps[at]
            me.send((rank + 1) % n, "reduce" if hop < last else "gather", parts[(rank - hop) % n][piece])
