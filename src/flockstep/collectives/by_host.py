"""All-reduce in two levels if workers share hosts: within each host, and between hosts over several connections at
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flockstep.arrays.schema import FlatArray, slices
from flockstep.collectives.base import Collective
from flockstep.collectives.costs import LinkModel
from flockstep.collectives.group import Group, Subgroup
from flockstep.collectives.ring import Ring
from flockstep.errors import ProtocolError


@dataclass(frozen=True)
class ByHost(Collective):
    """All-reduce by `flat` if all workers are on one host, or each worker is on its own host; otherwise in two levels
    (Jia et al. 2018).

    Let h be the number of hosts, and r the smallest number of workers on a host. The array is cut into r shares. On
    every host, one worker for each share sums the share over the workers of the host, beginning with its own array; the
    h workers with the same share sum it with `flat`; then each sends the sum to the other workers of its host. If the
    workers of a host share memory, they sum in shared memory, in the same order. Background tasks must not wait in
    shared memory: if the array lies in shared memory, they signal each other by messages without arrays; otherwise they
    send the shares. With a ring, every host sends 2(h-1)/h K elements to other hosts, where a ring of all n workers
    sends 2(n-1)/n K or more. In virtual time, the machines of the network `tiers` count as hosts.
    """

    flat: Collective = field(default_factory=Ring)

    async def divided_sum(self, me: Group, array: FlatArray, divisor: int) -> None:
        await (self._over_hosts(me, array, divisor) if _shared(me) else self.flat.divided_sum(me, array, divisor))

    async def average_of(self, me: Group, given: FlatArray, mean: FlatArray) -> None:
        if not _shared(me) or me.shared.corresponding(given) is None or me.shared.corresponding(mean) is None:
            await super().average_of(me, given, mean)
        else:
            await self._in_place(me, given, mean, _shares(me, mean), me.workers)

    async def _over_hosts(self, me: Group, array: FlatArray, divisor: int) -> None:
        """Replace `array` with the sum divided by `divisor`, in shared memory or with messages within each host."""
        host, shares = _host(me), _shares(me, array)
        lane = host.index(me.rank)
        if (summed := me.shared.reduce_scatter(array, len(shares))) is None:
            if me.shared.corresponding(array) is None:
                await self._with_messages(me, array, shares, divisor)
            else:
                await self._in_place(me, array, array, shares, divisor)
            return
        if lane in shares:
            await self._between_hosts(me, lane, summed[shares[lane]], divisor)
        me.shared.all_gather(summed, array, len(shares))

    async def _in_place(
        self, me: Group, given: FlatArray, total: FlatArray, shares: dict[int, slice], divisor: int
    ) -> None:
        """Replace `total` with the sum of `given`, divided by `divisor`; both lie in the memory that the host shares.

        Only signals are sent within the host: "inside" when `given` may be read and `total` written, and "outside" when
        a share has been written to the arrays of all workers of the host.
        """
        host = _host(me)
        here, lane = Subgroup(me, host), host.index(me.rank)
        others = [(lane + hop) % here.workers for hop in range(1, here.workers)]
        sources, targets = me.shared.corresponding(given), me.shared.corresponding(total)
        assert sources is not None
        assert targets is not None
        place = {"given": sources.offset, "total": targets.offset, "size": total.nbytes}
        here.send_all([to for to in others if to in shares], "inside", None, place)
        if lane in shares:
            part = shares[lane]
            view, more = total[part], given[part]
            for source in others:
                if (await here.receive("inside", source)).note != place:
                    raise ProtocolError(
                        f"worker {me.rank} adds up a different array than worker {host[source]}; call the collectives "
                        "in the same order on every worker, with arrays of the same size at the same place"
                    )
                np.add(more, sources.arrays[source][part], out=view)
                more = view
            await self._between_hosts(me, lane, view, divisor)
            for to in others:
                targets.arrays[to][part] = view
            here.send_all(others, "outside")
        for source in others:
            if source in shares:
                await here.receive("outside", source)
        me.shared.count(total, len(shares))

    async def _with_messages(self, me: Group, array: FlatArray, shares: dict[int, slice], divisor: int) -> None:
        host = _host(me)
        here, lane = Subgroup(me, host), host.index(me.rank)
        others = [(lane + hop) % here.workers for hop in range(1, here.workers)]
        for to in others:
            if to in shares:
                here.send(to, "inside", array[shares[to]])
        if lane in shares:
            view = array[shares[lane]]
            for source in others:
                view += await here.receive_array("inside", source)
            await self._between_hosts(me, lane, view, divisor)
            here.send_all(others, "outside", view)
        for source in others:
            if source in shares:
                await here.receive_array("outside", source, array[shares[source]])

    async def _between_hosts(self, me: Group, lane: int, share: FlatArray, divisor: int) -> None:
        """Replace a share that is summed within each host with the sum over the hosts, divided by `divisor`."""
        await self.flat.divided_sum(Subgroup(me, [host[lane] for host in me.hosts]), share, divisor)

    async def reduce_scatter(self, me: Group, array: FlatArray) -> tuple[slice, FlatArray]:
        """Reduce and scatter with `flat`, so that shares do not depend on hosts."""
        return await self.flat.reduce_scatter(me, array)

    def share(self, workers: int, size: int, rank: int) -> slice:
        return self.flat.share(workers, size, rank)

    async def all_gather(self, me: Group, array: FlatArray) -> list[FlatArray]:
        """Gather with `flat`; on several hosts, along a ring on which the workers of a host are adjacent."""
        if not _shared(me):
            return await self.flat.all_gather(me, array)
        order = [rank for host in me.hosts for rank in host]
        gathered = dict(zip(order, await super().all_gather(Subgroup(me, order), array), strict=True))
        return [gathered[rank] for rank in range(me.workers)]

    def cost(self, workers: int, nbytes: float, link: LinkModel) -> float:
        """Return the cost of `flat`, which is exact if all workers are on one host or each is on its own host."""
        return self.flat.cost(workers, nbytes, link)

    def sent_elements(self, workers: int, size: int, rank: int) -> int:
        return self.flat.sent_elements(workers, size, rank)

    def rounds(self, workers: int) -> int:
        return self.flat.rounds(workers)


def _shared(me: Group) -> bool:
    """Whether there are several hosts, and several workers on one of them."""
    return 1 < len(me.hosts) < me.workers


def _host(me: Group) -> tuple[int, ...]:
    """The members on this member's host."""
    return next(host for host in me.hosts if me.rank in host)


def _shares(me: Group, array: FlatArray) -> dict[int, slice]:
    """Lane → share of the array; there is a lane for every worker of the smallest host."""
    return dict(enumerate(slices(len(array), min(map(len, me.hosts)))))
