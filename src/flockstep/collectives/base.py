"""The interface of a collective."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ClassVar

from flockstep.arrays.namespace import copied, zeros
from flockstep.arrays.schema import FlatArray, slices
from flockstep.codecs.base import Bytes, Codec
from flockstep.collectives.costs import LinkModel
from flockstep.collectives.exchange import broadcast_on_tree, reduce_on_tree, signal_all, sum_shares
from flockstep.collectives.group import Group
from flockstep.expression import Component, fields_of


class Collective(Component):
    """An exchange in which every worker takes part, written over point-to-point messages.

    All workers must call the same operations in the same order, with arrays of the same size and dtype. All workers get
    bitwise identical results. Every operation raises `PeerLost` if a worker that it waits for has died, and
    `ProtocolError` if a message was lost; otherwise a later message would be mistaken for the lost one.
    """

    noun: ClassVar[str] = "collective"

    def __init_subclass__(cls, **options: Any) -> None:
        """Derive `divided_sum` from `all_reduce`, or the other way round, if the class overrides only one of them, so
        that the class does not inherit sums that leave its own sum out. The overridden method must not call the
        derived one.
        """
        super().__init_subclass__(**options)
        names = ("all_reduce", "divided_sum", "average", "average_of")
        summed, divided, mean, mean_of = (
            next(place for place, one in enumerate(cls.__mro__) if name in vars(one)) for name in names
        )
        if summed < divided:
            cls.divided_sum = _divided(cls.all_reduce)  # type: ignore[method-assign]
        elif divided < summed:
            cls.all_reduce = _undivided(cls.divided_sum)  # type: ignore[method-assign]
        if min(summed, divided, mean) < mean_of:
            cls.average_of = Collective.average_of  # type: ignore[method-assign]

    @property
    def over_messages(self) -> bool:
        """Whether all data travels in flockstep's messages, including the data of collectives inside this one. Only
        then can a group of some of a run's workers use the collective.
        """
        inner = [getattr(self, name) for name in fields_of(type(self))]
        return all(one.over_messages for one in inner if isinstance(one, Collective))

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        """Replace `array` on every worker with the sum over all workers, identical in every bit on all workers.

        A class defines this method, `divided_sum`, or both.

        Args:
            me: this worker's member of the group.
            array: this worker's contribution, of shape (K,), changed in place.

        Raises:
            PeerLost: a worker died, so that the sum cannot be completed.
            ProtocolError: a message was lost.
        """
        raise NotImplementedError(f"{type(self).__name__} must define all_reduce or divided_sum")

    async def reduce(self, me: Group, array: FlatArray, root: int = 0) -> None:
        """Replace `array` on `root` with the sum over all workers, along a binomial tree; other workers end with a
        partial sum in `array`.
        """
        await reduce_on_tree(me, array, root)

    async def broadcast(self, me: Group, array: FlatArray, root: int = 0) -> None:
        """Replace `array` on every worker with the array of `root`, sent along a binomial tree."""
        await broadcast_on_tree(me, array, root)

    async def reduce_scatter(self, me: Group, array: FlatArray) -> tuple[slice, FlatArray]:
        """Sum the arrays of all workers, leaving each worker with its `share` of the sum.

        The rest of `array` is undefined afterwards. Each worker sends every other worker the receiver's share, (P-1)/P
        K elements in P-1 messages in total; a share is summed in order of rank.

        Returns:
            The slice of `array` that is this worker's share, and the view of it, which holds the sum.
        """
        n, rank = me.workers, me.rank
        parts = [self.share(n, len(array), r) for r in range(n)]
        return parts[rank], await sum_shares(me, array, parts)

    def share(self, workers: int, size: int, rank: int) -> slice:
        """Return the slice of an array of `size` elements that rank `rank` holds after `reduce_scatter`. The slices of
        all ranks cover the array without overlap.
        """
        return slices(size, workers)[rank]

    async def all_gather(self, me: Group, array: FlatArray) -> list[FlatArray]:
        """Return a list of all workers' arrays, which may differ in size, in order of rank; each worker sends n-1
        messages along a ring.
        """
        n, rank = me.workers, me.rank
        gathered = [array] * n
        for hop in range(n - 1):
            me.send((rank + 1) % n, "pass", gathered[(rank - hop) % n])
            gathered[(rank - hop - 1) % n] = await me.receive_array("pass", (rank - 1) % n)
        return gathered

    async def barrier(self, me: Group) -> None:
        """Return once every worker has called `barrier`; each worker sends ⌈log2 P⌉ messages without an array."""
        await signal_all(me)

    async def average(self, me: Group, array: FlatArray) -> None:
        """Replace `array` on every worker with the mean over all workers."""
        if me.workers > 1:
            await self.divided_sum(me, array, me.workers)

    async def divided_sum(self, me: Group, array: FlatArray, divisor: int) -> None:
        """Replace `array` on every worker with the sum over all workers, divided by `divisor`."""
        raise NotImplementedError(f"{type(self).__name__} must define all_reduce or divided_sum")

    async def average_of(self, me: Group, given: FlatArray, mean: FlatArray) -> None:
        """Write the mean of all workers' arrays `given` to `mean` on every worker; `given` does not change."""
        mean[:] = given
        await self.average(me, mean)

    async def sum_encoded(self, me: Group, data: Bytes, codec: Codec, size: int, dtype: str) -> FlatArray:
        """Return the sum (size,) of all workers' decoded arrays, identical in every bit on all workers.

        Encodings of a linear codec are added term by term during the reduction; other encodings are gathered, and
        decoded in order of rank.
        """
        if codec.linear:
            data = copied(data)
            await self.all_reduce(me, codec.terms(data, size, dtype))
            return codec.decode(data, size, dtype)
        total: FlatArray = zeros(data, size, dtype=dtype)
        for piece in await self.all_gather(me, data):
            codec.add_decoded(piece, total)
        return total

    def cost(self, workers: int, nbytes: float, link: LinkModel) -> float:
        """Return the seconds that an `all_reduce` of `nbytes` bytes among P workers takes on `link`; exact if P is a
        power of two that divides the number of elements.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cost model; define cost, sent_elements and rounds")

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        """Return the exact number of elements that `rank` sends in an `all_reduce` of `size` elements."""
        raise NotImplementedError(f"{type(self).__name__} has no cost model; define cost, sent_elements and rounds")

    def rounds(self, workers: int) -> int:
        """Return the number of rounds of an `all_reduce`: the number of messages on the longest chain in which each
        message waits for the message before it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no cost model; define cost, sent_elements and rounds")


def _divided(all_reduce: Callable[..., Awaitable[None]]) -> Any:
    """The `divided_sum` of a class that defines `all_reduce`."""

    @wraps(Collective.divided_sum)
    async def divided_sum(self: Collective, me: Group, array: FlatArray, divisor: int) -> None:
        await all_reduce(self, me, array)
        if divisor != 1:
            array /= divisor

    return divided_sum


def _undivided(divided_sum: Callable[..., Awaitable[None]]) -> Any:
    """The `all_reduce` of a class that defines `divided_sum`."""

    @wraps(Collective.all_reduce)
    async def all_reduce(self: Collective, me: Group, array: FlatArray) -> None:
        await divided_sum(self, me, array, 1)

    return all_reduce
