"""Every n-th batch of any iterable of batches."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

B = TypeVar("B")


class ShardedBatches(Generic[B]):
    """Every n-th batch of an iterable, with the iterable's attributes; equally many batches on every worker."""

    def __init__(self, batches: Iterable[B], rank: int, workers: int):
        self._batches = batches
        self._rank = rank
        self._workers = workers
        self.epoch = 0
        """Number of the next epoch, on which the order of shuffled batches depends."""
        self._warned = False

    def __iter__(self) -> Iterator[B]:
        batches = _drawn_alike(self._batches, self.epoch)
        self.epoch += 1
        while len(turn := list(itertools.islice(batches, self._workers))) == self._workers:
            yield turn[self._rank]
        if turn and not self._warned and self._rank == 0:
            self._warned = True
            warnings.warn(
                f"flockstep.shard leaves out {len(turn)} of the last batches of an epoch, which are fewer than the "
                f"{self._workers} workers, so that all workers take equally many steps; yield a multiple of "
                f"{self._workers} of "
                "them, or split them by flockstep.rank() and train under optimizer.join()",
                UserWarning,
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self._batches) // self._workers  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self._batches, name)


def _drawn_alike(batches: Iterable[B], seed: int) -> Iterator[B]:
    """Iterate with a torch generator that is equal on every worker, even if scripts seed their own
    generators by rank.
    """
    if find_spec("torch") is None:
        yield from batches
        return
    import torch

    state, iterator, end = torch.Generator().manual_seed(seed).get_state(), None, object()
    while True:
        own = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            iterator = iter(batches) if iterator is None else iterator
            batch: Any = next(iterator, end)
        finally:
            state = torch.get_rng_state()
            torch.set_rng_state(own)
        if batch is end:
            return
        yield batch
