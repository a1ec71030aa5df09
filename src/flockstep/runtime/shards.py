"""`flockstep.shard`: gives each worker its part of an iterable of batches, with PyTorch or without."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from flockstep.errors import ConfigurationError
from flockstep.runtime.epochs import PrivateBatches, ShardedBatches, count_of, epochs_of
from flockstep.runtime.node_spec import require_own_process, spec_from_environment
from flockstep.runtime.replica import replica

B = TypeVar("B")


def shard(
    loader: Iterable[B],
    epoch: int | None = None,
    private: bool = False,
    *,
    seed: int | None = None,
    among: str | None = None,
) -> Iterable[B]:
    """Return this worker's part of `loader`; with one worker whom no other can join, `loader` itself.

    All workers must read the same data, of which each gets a part; `private` is for data that only this worker reads. A
    `DataLoader` over an indexable data set is split by samples; it is reshuffled each epoch if it shuffles. From a
    loader with a `batch_sampler`, worker i of n takes every n-th of the sampler's batches. From an `IterableDataset` or
    any other iterable, the worker takes every n-th batch, so the order must be equal on every worker. Of a custom
    sampler, such as one with weights, the worker takes every n-th index. Remaining batches at the end are dropped with
    a warning, so that every worker takes the same number of steps; of an indexable data set a few samples are repeated
    instead, unless its loader has `drop_last`. An order that is drawn with torch's global generator is the same on
    every worker, whatever seed the script sets: it depends on the number of the epoch and on `seed`. Without `seed`,
    the order depends on the seed of the run (`flockstep launch --seed`), and loaders in use at the same time have
    different seeds, in the order of their first calls of `shard`.

    With `private`, a worker's part is all of `loader`, of any kind and size, and the order depends on the number of the
    epoch and the rank. An epoch ends when every worker has used all of its batches once: until then a worker without
    batches takes part in the steps of the other workers, with gradients of zero, as under `optimizer.join()`. Under
    strategies that continue without a worker that leaves, such as asynchronous ones, workers do not wait for each
    other.

    Epochs are counted from 0 in this process: each pass over the data in which the process takes steps of the run is an
    epoch, so one worker may look at some batches alone. `epoch` sets the number of the next epoch, so that a script
    that continues from a checkpoint does not draw the order of its first epochs again.

    Where several processes hold a replica together (`flockstep launch --replica-size`), each replica is a worker: its
    processes read the same part, as tensor parallelism requires. With `among`, the name of a dimension of the replica's
    mesh, the processes along this dimension read different parts, as FSDP requires: `among="shard"`.

    Raises:
        ConfigurationError: `loader` is not iterable, it has a `DistributedSampler`, which already divides the samples,
            some worker would get no batch, `epoch` is negative, `among` is no dimension of the replica's mesh, or the
            script of a launched run has started this process.
    """
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise ConfigurationError(
            f"flockstep.shard needs batches, such as a DataLoader, a list or a generator, got {loader!r}; pass "
            "what the training loop iterates over"
        )
    if epoch is not None and epoch < 0:
        raise ConfigurationError(f"epoch must be >= 0, got {epoch}; give the number of the next epoch")
    require_own_process("shard")
    mine = replica()
    rank, workers = (mine.index, mine.count) if among is None else mine.place(among)
    spec = spec_from_environment()
    if workers == 1 and not (spec is not None and spec.changes):  # others that join get a part of the next pass
        return loader
    part: Any = None
    if not private and "torch.utils.data" in sys.modules:  # otherwise nobody has made a DataLoader
        from torch.utils.data import DataLoader

        if isinstance(loader, DataLoader):
            from flockstep.runtime.torch_data import split

            part = split(loader, rank, workers)
    if part is None:
        part = (PrivateBatches if private else ShardedBatches)(loader, rank, workers, count_of(loader))
    if epoch is not None:
        epochs_of(part).go_on(epoch)
    if seed is not None:
        epochs_of(part).seed = seed
    return part  # type: ignore[no-any-return]
