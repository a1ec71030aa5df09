"""Exchanges of a mover in which every rank takes part: programs over its node, each in a channel of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray
from flockstep.codecs.base import Bytes, Codec
from flockstep.collectives.base import Collective
from flockstep.collectives.exchange import children, parent, signal_all
from flockstep.drivers.mover_node import Party
from flockstep.drivers.mover_packets import Packet
from flockstep.messages import Array, Message
from flockstep.topologies.base import Topology


async def barrier(me: Party) -> None:
    """Return once every rank has come here."""
    await signal_all(me)


async def fence(me: Party) -> None:
    """Return once what any rank has put before is done everywhere.

    Messages of a pair arrive in order: whoever has heard everyone has what they put here, and once everyone has said
    that it heard everyone, so has everybody else.
    """
    for tag in ("issued", "done"):
        for rank in me.others:
            me.send(rank, tag)
        for rank in me.others:
            await me.receive(tag, rank)


async def all_reduce(me: Party, array: FlatArray, collective: Collective) -> FlatArray:
    """The sum of the flat arrays of all ranks, in `array` itself."""
    if me.workers > 1:
        await collective.all_reduce(me, array)
    return array


async def sum_encoded(me: Party, data: Bytes, codec: Codec, size: int, dtype: str, by: Collective) -> FlatArray:
    """The sum of what the encodings of all ranks stand for."""
    return await by.sum_encoded(me, data, codec, size, dtype)


async def all_gather(me: Party, packet: Packet) -> list[Message]:
    """The packets of all ranks, in order of rank; around a ring, since they may differ in size."""
    n, rank = me.workers, me.rank
    gathered = [Message(rank, "pass", packet.data, packet.note)] * n
    for hop in range(n - 1):
        known = gathered[(rank - hop) % n]
        note = {key: value for key, value in known.note.items() if key != "call"}
        me.send((rank + 1) % n, "pass", known.payload, note)
        gathered[(rank - hop - 1) % n] = await me.receive("pass", (rank - 1) % n)
    return gathered


async def reduce(me: Party, array: FlatArray, collective: Collective, to: int) -> FlatArray:
    """The sum of the flat arrays of all ranks, in `array` itself on rank `to`."""
    if me.workers > 1:
        await collective.reduce(me, array, to)
    return array


async def broadcast(me: Party, packet: Packet | None, source: int) -> Message:
    """The packet of rank `source`, passed on along a binomial tree."""
    if packet is not None:
        message = Message(me.rank, "down", packet.data, packet.note)
    else:
        message = await me.receive("down", parent(me.rank, me.workers, source))
    note = {key: value for key, value in message.note.items() if key != "call"}
    me.send_all(reversed(children(me.rank, me.workers, source)), "down", message.payload, note)
    return message


async def gather(me: Party, packet: Packet, to: int) -> list[Message] | None:
    """The packets of all ranks at rank `to`, in order of rank; None elsewhere."""
    if me.rank != to:
        me.send(to, "up", packet.data, packet.note)
        return None
    own = Message(me.rank, "up", packet.data, packet.note)
    return [own if rank == to else await me.receive("up", rank) for rank in range(me.workers)]


async def exchange(me: Party, packet: Packet, to: Sequence[int], of: Sequence[int]) -> list[Message]:
    """Give a packet to some ranks, and take one of each of some others."""
    for rank in to:
        me.send(rank, "mix", packet.data, packet.note)
    return [await me.receive("mix", rank) for rank in of]


@lru_cache(maxsize=64)
def mixing(topology: Topology, workers: int) -> tuple[npt.NDArray[np.float64], ...]:
    """The mixing matrices of one period of a topology."""
    return topology.schedule(workers)


def mixed(own: Array, weights: npt.NDArray[np.float64], rank: int, arrays: dict[int, Array]) -> Array:
    """Row `rank` of W times the arrays of all ranks, added in order of rank."""
    kind = own.dtype.type
    total = np.zeros_like(own)
    for other in range(len(weights)):
        if other == rank or other in arrays:
            total += kind(weights[rank, other]) * (own if other == rank else arrays[other])
    return total


async def scatter(me: Party, packets: Sequence[Packet]) -> list[Message]:
    """Give everyone the packet that is meant for it; those for this rank, in order of their senders."""
    for rank in me.others:
        me.send(rank, "part", packets[rank].data, packets[rank].note)
    own = Message(me.rank, "part", packets[me.rank].data, packets[me.rank].note)
    return [own if rank == me.rank else await me.receive("part", rank) for rank in range(me.workers)]
