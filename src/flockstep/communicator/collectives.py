"""The methods of a communicator that all ranks call together; they use the same collectives as the strategies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Codec
from flockstep.collectives.base import Collective
from flockstep.collectives.by_host import ByHost
from flockstep.collectives.exchange import signal_all, tree
from flockstep.collectives.ring import Ring
from flockstep.communicator.calls import Calls
from flockstep.communicator.encoded import Packet, at_hand, checked, codec_of, unpacked
from flockstep.communicator.rank import Rank
from flockstep.errors import ConfigurationError
from flockstep.feedback.base import Feedback
from flockstep.feedback.sender import check_composition, random_of
from flockstep.messages import Array, Message

if TYPE_CHECKING:
    from flockstep.topologies.base import Topology


class Collectives(Calls):
    """The methods that all ranks must call together, in the same order; calls from several threads at the same time
    need names.
    """

    def all_reduce(
        self,
        array: Any,
        collective: str | Collective = "by_host",
        codec: str | Codec | None = None,
        feedback: str | Feedback = "none",
        average: bool = False,
        out: Array | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> Array:
        """Return the sum (or mean) over all ranks, the same in every bit on all ranks, in a new array or in `out`.

        Args:
            array: this rank's array, of any shape; the same shape and dtype on all ranks.
            collective: the algorithm, as an expression such as "by_host".
            codec: the codec to encode arrays with, or None.
            feedback: what happens to the values that the codec drops; the feedback's memory serves the next call of the
                same name, with an array of the same shape.
            average: whether to divide the sum by the number of ranks.
            out: the array for the result. It may be `array` itself; an array made by `shared` is then summed in place.
            name: a name by which the ranks match calls from several threads.
            timeout: seconds to wait for the other ranks; None for no limit.

        Raises:
            CompositionError: the feedback would diverge with the codec.
            ConfigurationError: ranks call different collectives, or with arrays of different shapes or dtypes.
            PeerLost: a rank has left or died.
            TimedOut: the other ranks did not call within `timeout` seconds.
        """
        given, by, chosen = checked(array, self.max_bytes), Collective.parse(collective), codec_of(codec)
        sum_up = self._sums.get(id(array)) if out is array and chosen is None and by in (ByHost(), Ring()) else None
        if sum_up is not None:
            self.require_open()
            sum_up(self.workers if average else 1, timeout)
            return given
        if average:
            _require_real(given)
        what = f"all_reduce of {_described(given)} by {by}{_by(chosen)}"
        if chosen is None:
            flat = _scratch(given, out)
            total = self.run_collective(name, what, lambda me: _summed(me, flat, by), timeout)
        else:
            fit, data = self._kept(given, chosen, Feedback.parse(feedback), name)
            size, dtype = given.size, given.dtype.name
            total = self.run_collective(name, what, lambda me: by.sum_encoded(me, data, fit, size, dtype), timeout)
        if average:
            total /= self.workers
        return _into(total.reshape(given.shape), out)

    def reduce(
        self,
        array: Any,
        to: int = 0,
        collective: str | Collective = "by_host",
        codec: str | Codec | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> Array | None:
        """Return the sum over all ranks on rank `to`, and None on the other ranks.

        Raises the errors of `all_reduce`.
        """
        self.check_rank(to)
        given, by, chosen = checked(array, self.max_bytes), Collective.parse(collective), codec_of(codec)
        what = f"reduce to worker {to} of {_described(given)} by {by}{_by(chosen)}"
        if chosen is None:
            flat = _scratch(given, None)
            total = self.run_collective(name, what, lambda me: _summed(me, flat, by, to), timeout)
            return total.reshape(given.shape) if self.rank == to else None
        packets = {to: self.packet(given, chosen, f"reduce {name}")}
        of = range(self.workers) if self.rank == to else ()
        messages = self.run_collective(name, what, lambda me: _exchange(me, packets, of), timeout)
        return self._sum(messages, given) if messages else None

    def reduce_scatter(
        self, array: Any, codec: str | Codec | None = None, name: str = "", timeout: float | None = None
    ) -> Array:
        """Return the rank-th of n slices of the flat sum over all ranks, with lengths that differ by at most one.

        Every rank sends each slice to the rank that sums it, in order of rank. Raises the errors of `all_reduce`.
        """
        given, chosen = checked(array, self.max_bytes), codec_of(codec)
        flat = given.reshape(-1)
        parts = [flat[part] for part in slices(flat.size, self.workers)]
        packets = {to: self.packet(part, chosen, f"reduce_scatter {name}") for to, part in enumerate(parts)}
        what = f"reduce_scatter of {_described(given)}{_by(chosen)}"
        messages = self.run_collective(name, what, lambda me: _exchange(me, packets, packets), timeout)
        return self._sum(messages, parts[self.rank])

    def broadcast(
        self,
        array: Any = None,
        source: int = 0,
        codec: str | Codec | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> Array:
        """Return the array of rank `source` on every rank, decoded if a codec is given; other ranks may omit the array.

        Raises the errors of `all_reduce`.
        """
        self.check_rank(source)
        packet = self.packet(array, codec, f"broadcast {name}") if self.rank == source else None
        what = f"broadcast from worker {source}"
        message = self.run_collective(name, what, lambda me: _broadcast(me, packet, source), timeout)
        return unpacked(message, self.max_bytes)

    def all_gather(
        self, array: Any, codec: str | Codec | None = None, name: str = "", timeout: float | None = None
    ) -> list[Array]:
        """Return the arrays of all ranks, in order of rank; shapes and dtypes may differ. Raises the errors of
        `all_reduce`.
        """
        packet = self.packet(array, codec, f"all_gather {name}")
        messages = self.run_collective(name, "all_gather", lambda me: _all_gather(me, packet), timeout)
        return [unpacked(message, self.max_bytes) for message in messages]

    def neighbor_average(
        self,
        array: Any,
        topology: str | Topology = "ring",
        codec: str | Codec | None = None,
        name: str = "",
        timeout: float | None = None,
    ) -> Array:
        """Return the weighted mean of the arrays of this rank r and its neighbors: row r of W times the arrays of all
        ranks.

        W is the topology's mixing matrix; with a topology that changes, successive calls of the same name go through
        its period. The codec applies to what other ranks send, not to this rank's own array. Raises the errors of
        `all_reduce`.
        """
        from flockstep.topologies.base import Topology

        given, graph, rank = checked(array, self.max_bytes), Topology.parse(topology), self.rank
        _require_real(given)
        period = _mixing(graph, self.workers)
        weights = period[self._count(f"neighbor_average {name}") % len(period)]
        packet = self.packet(given, codec, f"neighbors {name}")
        packets = {other: packet for other in range(self.workers) if other != rank and weights[other, rank]}
        of = [other for other in range(self.workers) if other != rank and weights[rank, other]]
        what = f"neighbor_average of {_described(given)} on {graph}"
        messages = self.run_collective(name, what, lambda me: _exchange(me, packets, of), timeout)
        arrays = {message.source: self._like(message, given) for message in messages}
        return _mixed(given, weights, rank, arrays)

    def barrier(self, name: str = "", timeout: float | None = None) -> None:
        """Return once every rank has called `barrier`. Raises the errors of `all_reduce`."""
        self.run_collective(name, "barrier", signal_all, timeout)

    def agree(self, what: str, timeout: float | None = None) -> None:
        """Barrier in which all ranks must pass the same text `what`; it returns once every rank has called it.

        Raises:
            ConfigurationError: a rank called the method with another `what`.
        """
        self.run_collective("", what, signal_all, timeout)

    def _kept(self, array: Array, codec: Codec, feedback: Feedback, name: str) -> tuple[Codec, Array]:
        """Return the codec for this array and call, and the encoding of the array with the feedback's memory."""
        check_composition(codec, feedback)
        step, key = self._count(f"all_reduce {name}"), f"{name} {_described(array)} {codec} {feedback}"
        fit = at_hand(codec, array, step, feedback)
        random, flat = random_of(fit, self._random(), step), array.reshape(-1)
        data, memory = feedback.bind_workers(self.workers).encode(fit, flat, self._memories.get(key), random)
        self._memories[key] = memory
        return fit, np.asarray(data)

    def _sum(self, messages: Sequence[Message], like: Array) -> Array:
        """Return the sum of the arrays in the messages, in that order."""
        total = np.zeros_like(like, order="C")
        for message in messages:
            total += self._like(message, like)
        return total

    def _like(self, message: Message, given: Array) -> Array:
        array = unpacked(message, self.max_bytes)
        if array.shape != given.shape or array.dtype != given.dtype:
            raise ConfigurationError(
                f"all workers must pass arrays of the same shape and dtype, got {_described(array)} from worker "
                f"{message.source} and {_described(given)} from worker {self.rank}; pass equally shaped arrays"
            )
        return array


async def fence(me: Rank) -> None:
    """Return once all puts that any rank made before are done on every rank.

    Messages between two ranks arrive in order. A rank that has received "issued" from every rank has received all their
    puts. Once every rank has sent "done", this is true of all ranks.
    """
    for tag in ("issued", "done"):
        for rank in me.others:
            me.send(rank, tag)
        for rank in me.others:
            await me.receive(tag, rank)


async def _all_gather(me: Rank, packet: Packet) -> list[Message]:
    """Return the packets of all ranks, in order of rank, passed around a ring, because their sizes may differ.

    On the ring, the ranks of a host follow one another.
    """
    order = [rank for host in me.hosts for rank in host]
    n, place = me.workers, order.index(me.rank)
    gathered = [Message(me.rank, "pass", packet.data, packet.note)] * n
    for hop in range(n - 1):
        known = gathered[order[(place - hop) % n]]
        me.send(order[(place + 1) % n], "pass", known.payload, known.note)
        gathered[order[(place - hop - 1) % n]] = await me.receive("pass", order[(place - 1) % n])
    return gathered


async def _broadcast(me: Rank, packet: Packet | None, source: int) -> Message:
    """Return the packet of rank `source`, passed along a tree over hosts and their ranks."""
    above, below = tree(me.hosts, me.rank, source)
    if packet is not None:
        message = Message(me.rank, "down", packet.data, packet.note)
    else:
        message = await me.receive("down", above)
    me.send_all(reversed(below), "down", message.payload, message.note)
    return message


async def _exchange(me: Rank, packets: Mapping[int, Packet], of: Iterable[int]) -> list[Message]:
    """Send each packet to its rank, and return one message from each rank of `of`, in that order."""
    for rank, packet in packets.items():
        if rank != me.rank:
            me.send(rank, "part", packet.data, packet.note)
    taken = []
    for rank in of:
        if rank != me.rank:
            taken.append(await me.receive("part", rank))
        else:
            taken.append(Message(rank, "part", packets[rank].data, packets[rank].note))
    return taken


async def _summed(me: Rank, array: FlatArray, by: Collective, to: int | None = None) -> FlatArray:
    """Sum the flat arrays of all ranks into `array`: on every rank, or on rank `to`."""
    if me.workers > 1:
        await (by.all_reduce(me, array) if to is None else by.reduce(me, array, to))
    return array


@lru_cache(maxsize=64)
def _mixing(topology: Topology, workers: int) -> tuple[npt.NDArray[np.float64], ...]:
    """Return the mixing matrices of one period of a topology."""
    return topology.schedule(workers)


def _mixed(own: Array, weights: npt.NDArray[np.float64], rank: int, arrays: dict[int, Array]) -> Array:
    """Return row `rank` of W times the arrays of all ranks, added in order of rank."""
    kind = own.dtype.type
    total = np.zeros_like(own)
    for other in range(len(weights)):
        if other == rank or other in arrays:
            total += kind(weights[rank, other]) * (own if other == rank else arrays[other])
    return total


def _described(array: Array) -> str:
    return f"{array.dtype.name} {array.shape}"


def _by(codec: Codec | None) -> str:
    return "" if codec is None else f" with {codec}"


def _require_real(array: Array) -> None:
    if array.dtype.kind in "biu":
        raise ConfigurationError(f"a mean needs floating-point numbers, got {array.dtype}; convert the array")


def _scratch(array: Array, out: Array | None) -> Array:
    """Return a flat array to compute in: the array's own memory if the result goes there anyway, otherwise a copy."""
    if out is array and array.flags.c_contiguous and array.flags.writeable:
        return array.reshape(-1)
    return np.array(array, order="C").reshape(-1)


def _into(result: Array, out: Array | None) -> Array:
    if out is None or np.may_share_memory(result, out):
        return result if out is None else out
    out[...] = result
    return out
