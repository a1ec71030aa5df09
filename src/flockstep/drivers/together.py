"""Sums over the workers of one host, in memory that they share, on a node's books."""

from __future__ import annotations

import numpy as np

from flockstep.arrays.schema import FlatArray
from flockstep.drivers.member import Member
from flockstep.drivers.real import Seat
from flockstep.nodes import Cluster
from flockstep.transports.shared_group import SUMMED, SharedGroup, room_for


def group_of(member: Member, cluster: Cluster) -> SharedGroup | None:
    """This worker's view of the memory that all workers of the run share, if they do."""
    if member.memory is None or cluster.workers == 1:
        return None
    room = room_for(member.schema.nbytes)
    return SharedGroup(member.memory, member.ticket.address, cluster.workers, room)


def home_of(group: SharedGroup | None, size: int, dtype: str) -> FlatArray:
    """An array of zeros (size,), where sums can be had in place if there is such a place."""
    if group is not None and dtype in SUMMED:
        return group.allocate(size, dtype)
    return np.zeros(size, dtype)


class Together:
    """A worker's part in such sums: it goes on listening to the supervisor while it waits for the others."""

    def __init__(self, group: SharedGroup, seat: Seat):
        self._group = group
        self._seat = seat

    def all_reduce(self, array: FlatArray, divisor: int = 1) -> bool:
        """Replace `array` by the sum over all workers, divided; bits and books as of a ring. False: it cannot be had.

        Raises:
            PeerLost: a worker has left or died.
        """
        group = self._group
        if not group.can(array):
            return False
        group.all_reduce(array, self._seat.listen, divisor)
        self._seat.account.waited += group.waited
        self._seat.account.traffic.moved(*group.moved(array))
        return True
