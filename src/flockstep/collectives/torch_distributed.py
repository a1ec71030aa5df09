"""Collectives of torch.distributed: gloo, NCCL or MPI instead of flockstep's messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flockstep.arrays.namespace import empty, zeros
from flockstep.arrays.schema import FlatArray, slices
from flockstep.collectives.base import Collective
from flockstep.collectives.group import Group
from flockstep.errors import CompositionError, ConfigurationError, MissingDependency
from flockstep.programs import completed

if TYPE_CHECKING:
    from flockstep.links.process_groups import ProcessGroup

BACKENDS = ("gloo", "nccl", "mpi")


@dataclass(frozen=True)
class TorchDistributed(Collective):
    """Executes every operation with torch.distributed (Li et al. 2020), which uses its own sockets and threads.

    The workers must be separate processes. All workers get the same bits, but the order of addition is the backend's:
    the result may differ from that of `ring` by rounding. In a background task the operation continues while gradients
    are computed. The recorded bytes are computed from the formulas of the methods below, because flockstep cannot
    observe the backend's sockets; the figure `bytes_by_formula` records their number. All workers must start the same
    operations in the same order, including those of background tasks.
    """

    backend: str = "gloo"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigurationError(
                f"backend must be one of {', '.join(BACKENDS)}, got {self.backend!r}; gloo works everywhere"
            )

    @property
    def over_messages(self) -> bool:
        return False

    async def all_reduce(self, me: Group, array: FlatArray) -> None:
        """Replace `array` with the sum over all workers; each worker sends 2(n-1)/n K elements."""
        if me.workers == 1:
            return
        work = self._group(me).sum_up(array)
        _book(me, 2 * (me.workers - 1) * array.nbytes // me.workers, 2 * (me.workers - 1))
        await completed(work)

    async def reduce(self, me: Group, array: FlatArray, root: int = 0) -> None:
        """Replace `array` on `root` with the sum; each worker sends (n-1)/n K elements on average."""
        if me.workers == 1:
            return
        work = self._group(me).reduce(array, root)
        _book(me, (me.workers - 1) * array.nbytes // me.workers, 1)
        await completed(work)

    async def broadcast(self, me: Group, array: FlatArray, root: int = 0) -> None:
        """Replace `array` on every worker with the array of `root`; each worker sends (n-1)/n K elements on average."""
        if me.workers == 1:
            return
        work = self._group(me).broadcast(array, root)
        _book(me, (me.workers - 1) * array.nbytes // me.workers, 1)
        await completed(work)

    async def reduce_scatter(self, me: Group, array: FlatArray) -> tuple[slice, FlatArray]:
        """Sum over all workers, and leave each worker with its share; each worker sends (n-1)/n K elements, with shares
        padded to equal size.
        """
        n, parts = me.workers, slices(len(array), me.workers)
        view = array[parts[me.rank]]
        if n > 1:
            longest = parts[0].stop - parts[0].start
            filled = zeros(array, n, longest)
            for row, part in zip(filled, parts, strict=True):
                row[: part.stop - part.start] = array[part]
            own = empty(array, longest)
            work = self._group(me).scatter_sum(own, list(filled))
            _book(me, (n - 1) * own.nbytes, n - 1)
            await completed(work)
            view[:] = own[: len(view)]
        return parts[me.rank], view

    async def all_gather(self, me: Group, array: FlatArray) -> list[FlatArray]:
        """Return the arrays of all workers, in order of rank; each worker sends n-1 times the size of the largest
        array, after an exchange of the sizes.
        """
        n = me.workers
        if n == 1:
            return [array]
        group, sizes = self._group(me), np.empty((n, 1), np.int64)
        asked = group.gather(np.array([len(array)], np.int64), list(sizes))
        assert me.rendezvous is not None
        me.rendezvous.attend(asked)  # at once, so that all workers start the next operation in the same order
        filled = zeros(array, int(sizes.max()))
        filled[: len(array)] = array
        gathered = empty(array, n, len(filled))
        work = group.gather(filled, list(gathered))
        _book(me, (n - 1) * (8 + filled.nbytes), 2 * (n - 1))
        await completed(work)
        return [row[: int(size[0])] for row, size in zip(gathered, sizes, strict=True)]

    async def barrier(self, me: Group) -> None:
        if me.workers > 1:
            await completed(self._group(me).meet())

    def _group(self, me: Group) -> ProcessGroup:
        """Return the process group of all workers, created at first use.

        Raises:
            CompositionError: the workers are not separate processes.
            ConfigurationError: the workers are on several hosts.
        """
        meeting = me.rendezvous
        if meeting is None:
            raise CompositionError(
                f"{self} needs workers in separate processes, as flockstep train and launch start them; in virtual "
                "time use ring, which has the same cost"
            )
        if self.backend not in meeting.held:
            try:
                from flockstep.links.process_groups import ProcessGroup
            except ModuleNotFoundError:
                raise MissingDependency.of("PyTorch", "torch", str(self)) from None
            meeting.held[self.backend] = ProcessGroup(self.backend, meeting, len(me.hosts))
        group = meeting.held[self.backend]
        return group  # type: ignore[return-value]


def _book(me: Group, nbytes: int, messages: int) -> None:
    assert me.rendezvous is not None
    me.rendezvous.moved(nbytes, nbytes, messages)
