"""A worker's own batches, in epochs that end on all workers together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TypeVar

from flockstep.drivers.epochs import EpochBatches, drawn
from flockstep.drivers.membership import memberships_here
from flockstep.errors import ConfigurationError

B = TypeVar("B")


class PrivateBatches(EpochBatches[B]):
    """All batches of an iterable that this worker alone has.

    A worker whose batches run out takes part in the steps of the other workers until every worker has used all of its
    batches, as under `optimizer.join()`: every batch is used exactly once in an epoch, and all workers begin the next
    epoch together.
    """

    def of_epoch(self, epoch: int) -> Iterator[B]:
        """Yield all batches of one epoch.

        Raises:
            ConfigurationError: there is no batch.
        """
        with ExitStack() as stack:
            for here in memberships_here():
                if here.epoch is not None:
                    stack.enter_context(here.epoch())
            none = True
            for batch in drawn(self._batches, self._epochs.seed + epoch * self._workers + self._rank):
                none = False
                yield batch
            if none:
                raise ConfigurationError(
                    f"worker {self._rank} has no batch in epoch {epoch}; start only as many workers as have data, "
                    "and give shard a loader or a list, because a generator is empty after one epoch"
                )

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]
