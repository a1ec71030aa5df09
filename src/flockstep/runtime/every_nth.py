"""Selects every n-th batch of any iterable of batches, or every n-th index of a sampler."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TypeVar

from flockstep.errors import ConfigurationError
from flockstep.runtime.data_digest import digest_of, tell_data
from flockstep.runtime.epochs import EpochBatches, drawn

B = TypeVar("B")


class ShardedBatches(EpochBatches[B]):
    """Batches i, i + n, i + 2n, … of an iterable, for worker i of n; every worker gets the same number of batches."""

    what = "batches"
    """What the iterable yields."""
    certain = False
    """Whether all workers must read equal values; batches may contain random changes of each worker."""
    _told = _warned = False

    def of_epoch(self, epoch: int) -> Iterator[B]:
        """Yield this worker's batches of one epoch.

        Raises:
            ConfigurationError: there are batches, but fewer than workers.
        """
        return self.in_order(self._epochs.seed + epoch)

    def in_order(self, seed: int) -> Iterator[B]:
        """Yield this worker's batches in the order that is drawn with the given seed."""
        batches, turns = drawn(self._batches, seed), 0
        while len(turn := list(itertools.islice(batches, self._workers))) == self._workers:
            if not turns:
                self._compare(turn)
            yield turn[self._rank]
            turns += 1
        if turn and not turns:
            raise ConfigurationError(
                f"flockstep.shard gives each of {self._workers} workers the same number of {self.what}, but the epoch "
                f"has only {len(turn)}; use at most {len(turn)} workers, or smaller batches"
            )
        if turn and not self._told and self._rank == 0:
            self._told = True
            warnings.warn(
                f"flockstep.shard leaves out the last {len(turn)} {self.what} of an epoch because all {self._workers} "
                f"workers must take the same number of steps; yield a multiple of {self._workers} {self.what}, or let "
                "each worker read different data, with private=True",
                UserWarning,
                stacklevel=2,
            )

    def _compare(self, turn: list[B]) -> None:
        """Compare the first batches of an epoch with those of other workers, and of other loading processes."""
        digests = list(map(digest_of, turn))
        tell_data(self._epochs.number, self.what, " ".join(digests), self.certain)
        loading = getattr(self._batches, "num_workers", 0)
        if loading > 1 and self._rank == 0 and digests[0] == digests[1] and not self._warned:
            self._warned = True
            warnings.warn(
                f"the {loading} processes of the loader read the same batches, so every sample occurs {loading} times "
                "in an epoch; let the __iter__ of the data set yield a different part in each process, with "
                "torch.utils.data.get_worker_info()",
                UserWarning,
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self._batches) // self._workers  # type: ignore[arg-type]
