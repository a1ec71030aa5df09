"""`flockstep.shard`: each worker's part of anything that yields batches, with PyTorch or without it."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from flockstep.drivers.ticket import place_of_script, require_own_process, ticket_from_environment

B = TypeVar("B")


class Shard(Generic[B]):
    """Every n-th batch of an iterable, which has all its attributes; equally many batches on every worker."""

    def __init__(self, batches: Iterable[B], rank: int, workers: int):
        self._batches = batches
        self._rank = rank
        self._workers = workers
        self._epoch = 0
        self._told = False

    def __iter__(self) -> Iterator[B]:
        batches = _drawn_alike(self._batches, self._epoch)
        self._epoch += 1
        while len(turn := list(itertools.islice(batches, self._workers))) == self._workers:
            yield turn[self._rank]
        if turn and not self._told and self._rank == 0:
            self._told = True
            warnings.warn(
                f"flockstep.shard leaves out {len(turn)} of the last batches of an epoch, which are fewer than the "
                f"{self._workers} workers, so that all take as many steps; yield a multiple of {self._workers} of "
                "them, or split them by flockstep.rank() and train under optimizer.join()",
                UserWarning,
                stacklevel=2,
            )

    def __len__(self) -> int:
        return len(self._batches) // self._workers  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._batches, name)


def _drawn_alike(batches: Iterable[B], seed: int) -> Iterator[B]:
    """Iterate with a torch generator that is the same on every worker, whose script may have seeded its own by rank."""
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


def shard(loader: Iterable[B]) -> Iterable[B]:
    """This worker's part of what `loader` yields; all of it where nobody launched several workers.

    A `DataLoader` over a data set that can be indexed is split by samples, reshuffled each epoch if it shuffles, and
    stays as it is otherwise. Where it has a `batch_sampler`, worker i of n takes every n-th of its batches, as it does
    from an `IterableDataset` and from anything else, whose order has to be the same on every worker; what is left over
    at the end is dropped, with a warning, so that every worker takes as many steps; of a data set that can be indexed
    a few samples come twice instead, unless its loader has `drop_last`. What torch's own generator draws for that order
    is the same on every worker and in every run, however a script has seeded it: it follows the number of the epoch.

    Raises:
        ConfigurationError: the loader has a sampler of its own, which says already who gets what, or the script of a
            launched run has started this process.
    """
    place_of_script()
    require_own_process("shard")
    ticket = ticket_from_environment()
    if ticket is None or ticket.workers == 1:
        return loader
    if find_spec("torch") is not None:
        from torch.utils.data import DataLoader

        from flockstep.drivers.torch_data import split

        if isinstance(loader, DataLoader):
            return split(loader, ticket.address, ticket.workers)
    return Shard(loader, ticket.address, ticket.workers)
