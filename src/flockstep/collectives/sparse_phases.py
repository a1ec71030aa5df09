"""The steps of which sparse all-reduces consist: sums by recursive doubling, sums of parts, and the gathering of
parts.
"""

from __future__ import annotations

from flockstep.arrays.namespace import copied, zeros
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.collectives.costs import doublings
from flockstep.collectives.group import Group
from flockstep.collectives.streams import Stream


async def summed_by_doubling(me: Group, stream: Stream, dtype: str) -> Stream:
    """Sum the streams of all workers by recursive doubling; workers beyond the largest power of two fold first."""
    power, size = 1 << doublings(me.workers), stream.size
    if me.rank >= power:
        me.send(me.rank - power, "fold", stream.wire)
        arrived = await me.receive_array("unfold", me.rank - power)
        return Stream.arrived(copied(arrived), size, dtype)  # the caller may change the sum
    folded = me.rank + power < me.workers
    if folded:
        stream = stream.plus(Stream.arrived(await me.receive_array("fold", me.rank + power), size, dtype))
    distance = 1
    while distance < power:
        partner = me.rank ^ distance
        me.send(partner, "double", stream.wire)
        stream = stream.plus(Stream.arrived(await me.receive_array("double", partner), size, dtype))
        distance *= 2
    if folded:
        me.send(me.rank + power, "unfold", stream.wire)
    return stream


async def summed_parts(me: Group, size: int, values: FlatArray, indices: FlatArray, dtype: str) -> Stream:
    """Return the part of the sum that belongs to this worker: its part of the index range, added in order of rank.

    Each worker sends n-1 messages of a part's elements.
    """
    n, rank, parts = me.workers, me.rank, slices(size, me.workers)
    values = copied(values)
    values += 0.0  # in place, because numpy would widen bfloat16
    whole = Stream(size, values, indices)
    for hop in range(1, n):  # each worker begins with a different receiver
        to = (rank + hop) % n
        me.send(to, "part", whole.cut(parts[to]).wire)
    length = parts[rank].stop - parts[rank].start
    total = Stream.of(length, values[:0], indices[:0])
    for source in range(n):
        here = source == rank
        piece = (
            whole.cut(parts[rank]) if here else Stream.arrived(await me.receive_array("part", source), length, dtype)
        )
        total = total.plus(piece)
    return total


async def gathered_parts(me: Group, own: Stream, size: int, dtype: str, codec: Codec | None, dense: bool) -> FlatArray:
    """Gather the parts of the sum from the workers that hold them, and return the whole array; with `dense`, parts
    travel as dense arrays encoded by `codec`.
    """
    parts = slices(size, me.workers)
    total: FlatArray = zeros(own.values, size, dtype=dtype)
    message = own.dense() if dense else own.wire
    if dense and codec is not None:
        message = codec.encode(message, me.random)
    for hop in range(me.workers):  # around the ring, passing on what arrived last
        source = (me.rank - hop) % me.workers
        if hop:
            message = await me.receive_array("sum", (me.rank - 1) % me.workers)
        if hop < me.workers - 1:
            me.send((me.rank + 1) % me.workers, "sum", message)
        part = parts[source]
        length = part.stop - part.start
        if dense and codec is not None:
            total[part] = codec.decode(message, length, dtype)
        else:
            total[part] = Stream.arrived(message, length, dtype).dense()
    return total
