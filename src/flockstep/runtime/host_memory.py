"""A worker's arrays in memory that the workers of its host share, and sums of such arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np

from flockstep.arrays.namespace import is_tensor, to_device_of, to_host
from flockstep.arrays.schema import FlatArray, slices
from flockstep.links.shared_group import SUMMED, SharedGroup
from flockstep.nodes import Worker
from flockstep.programs import HostArrays, SharedArrays
from flockstep.runtime.node_metrics import NodeMetrics


class GroupMemory(SharedArrays):
    """Base class of shared arrays: a worker's place in a group of processes that share a segment.

    Sums wait for the other workers, and raise `PeerLost` if one of them will never arrive.
    """

    def __init__(self, group: SharedGroup, worker: Worker, metrics: NodeMetrics, meanwhile: Callable[[], None]):
        """`meanwhile` is called from time to time while the worker waits for others."""
        self._group = group
        self._worker = worker
        self._metrics = metrics
        self._meanwhile = meanwhile
        self._allocated: dict[tuple[int, str], FlatArray] = {}

    def home(self, gradients: FlatArray) -> FlatArray:
        """Return an array for a worker's gradients: one in shared memory if it can be summed there, otherwise
        `gradients` itself.
        """
        if is_tensor(gradients) or gradients.dtype.name not in SUMMED:
            return gradients
        return self._group.allocate(len(gradients), gradients.dtype.name)

    def taken_home(self, gradients: FlatArray) -> FlatArray:
        """Return `gradients`, copied out of shared memory if `home` placed them there."""
        return self._group.taken(gradients) if self._holds(gradients) else gradients

    def _holds(self, array: FlatArray) -> bool:
        return not is_tensor(array) and self._group.can(array) and self._group.holds(array)

    def _summable(self, array: FlatArray) -> FlatArray | None:
        """Return `array` in the host's memory; None if it cannot be summed, or a background task asks, which must not
        wait, and for which nothing is copied.
        """
        here = None if self._worker.in_background else to_host(array)
        return here if here is not None and self._group.can(here) else None

    def _waited(self) -> None:
        self._metrics.waited += self._group.waited
        self._worker.port.turn()

    def _kept(self, size: int, dtype: str) -> FlatArray:
        """Return an array in shared memory, the same for equal size and dtype."""
        if (size, dtype) not in self._allocated:
            self._allocated[size, dtype] = self._group.allocate(size, dtype)
        return self._allocated[size, dtype]


class RunMemory(GroupMemory):
    """Memory that all workers of a run share; traffic is counted as if messages had carried the arrays."""

    covers_run: ClassVar[bool] = True

    def all_reduce(self, array: FlatArray, divisor: int = 1) -> bool:
        if (here := self._summable(array)) is None:
            return False
        self._group.all_reduce(here, self._meanwhile, divisor)
        self._waited()
        self._metrics.traffic.moved(*self._group.moved(here))
        if here is not array:
            array[:] = to_device_of(here, array)
        return True

    def mean_of_slice(self, array: FlatArray) -> FlatArray | None:
        if self._worker.in_background or not self._holds(array):
            return None
        part = slices(len(array), self._group.workers)[self._group.rank]
        mean = self._slot(array)[: part.stop - part.start]
        self._group.mean_of_part(array, mean, self._meanwhile)
        self._waited()
        return mean

    def exchange_slices(self, own: FlatArray, into: FlatArray) -> None:
        group, slot = self._group, self._slot(into)
        slot[: len(own)] = own
        group.exchange_parts(slot, into, self._meanwhile)
        self._waited()
        nbytes, messages = group.moved_in_shares(into, group.workers)
        self._metrics.traffic.moved(nbytes, nbytes, messages)

    def _slot(self, array: FlatArray) -> FlatArray:
        """Place in shared memory for this worker's slice of the mean of `array`, and then of the parameters."""
        return self._kept(-(-len(array) // self._group.workers), array.dtype.name)


class HostMemory(GroupMemory):
    """Memory that the workers of one host share, in a run with several hosts; traffic is counted as if messages had
    carried the shares.
    """

    def __init__(
        self, group: SharedGroup, worker: Worker, metrics: NodeMetrics, meanwhile: Callable[[], None], model_bytes: int
    ):
        super().__init__(group, worker, metrics, meanwhile)
        self._staging = group.allocate(-(-model_bytes // 8), "float64")
        """Place in shared memory for arrays that are summed and that lie elsewhere."""

    def reduce_scatter(self, array: FlatArray, shares: int) -> FlatArray | None:
        given = self._summable(array)
        if given is None or given.nbytes > self._staging.nbytes:
            return None
        here = given
        if not self._group.holds(given):
            here = self._staging.view(given.dtype)[: len(given)]
            here[:] = given
        self._group.reduce_scatter(here, shares, self._meanwhile)
        self._waited()
        return here

    def all_gather(self, summed: FlatArray, array: FlatArray, shares: int) -> None:
        self._group.all_gather(summed, shares, self._meanwhile)
        self._waited()
        nbytes, messages = self._group.moved_in_shares(summed, shares)
        self._metrics.traffic.moved(nbytes, nbytes, messages)
        if summed is not array:
            array[:] = to_device_of(summed, array)

    def corresponding(self, array: FlatArray) -> HostArrays | None:
        if not self._holds(array):
            return None
        offset = self._group.offset(array)
        assert offset is not None
        return HostArrays(offset, [self._group.at(place, array) for place in range(self._group.workers)])

    def count(self, array: FlatArray, shares: int) -> None:
        """Count the bytes that workers exchanged through shared memory, for which only messages without arrays were
        sent.
        """
        nbytes, _ = self._group.moved_in_shares(array, shares)
        self._metrics.traffic.moved(nbytes, nbytes, 0)

    def empty(self, size: int, like: FlatArray) -> FlatArray:
        if is_tensor(like):
            return super().empty(size, like)
        name = like.dtype.name
        return self._kept(size, name) if name in SUMMED else np.empty(size, name)
