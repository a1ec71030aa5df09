"""`flockstep.shard`: each worker's part of anything that yields batches, with PyTorch or without it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TypeVar

from flockstep.drivers.every_nth import Shard
from flockstep.drivers.ticket import place_of_script, require_own_process, ticket_from_environment

B = TypeVar("B")


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
