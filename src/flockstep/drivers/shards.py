"""`flockstep.shard`: each worker's part of an iterable of batches, with PyTorch or without it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TypeVar

from flockstep.drivers.every_nth import Shard
from flockstep.drivers.ticket import place_of_script, require_own_process, ticket_from_environment

B = TypeVar("B")


def shard(loader: Iterable[B]) -> Iterable[B]:
    """Return this worker's part of `loader`; without several workers, `loader` itself.

    A `DataLoader` over an indexable data set is split by samples; it is reshuffled each epoch if it shuffles. From a
    loader with a `batch_sampler`, worker i of n takes every n-th of the sampler's batches. From an `IterableDataset` or
    any other iterable it takes every n-th batch, so the order must be equal on every worker. Remaining batches at the
    end are dropped with a warning, so that every worker takes equally many steps; of an indexable data set a few
    samples are repeated instead, unless its loader has `drop_last`. Random numbers of torch's own generator for the
    order are equal on every worker and in every run, whatever seed a script sets: they depend on the number of the
    epoch.

    Raises:
        ConfigurationError: the loader has a custom sampler, which already assigns the samples, or the script of a
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
