"""The default process group of torch.distributed, in which a training framework exchanges metrics and decisions.

Lightning, Accelerate and their callers compute metrics, agree on stopping and write checkpoints by calls of
torch.distributed. Gradients and parameters are exchanged by a strategy, not in this group.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from flockstep.drivers.membership import barrier, memberships_here
from flockstep.drivers.node_spec import enter_run, place_of_script
from flockstep.drivers.place import place_from
from flockstep.errors import CompositionError, ConfigurationError
from flockstep.transports.process_groups import FOREVER, private_store

T = TypeVar("T")


def open_group(framework: str) -> None:
    """Open the default process group of all workers, with gloo; do nothing if the script has opened a group or runs
    alone.

    The group's connections stay within the host. Under torchrun, or wherever the script has set MASTER_ADDR and
    MASTER_PORT, the group meets at that address.

    Raises:
        ConfigurationError: the open group has other ranks than the run, or the workers are on several hosts and
            MASTER_ADDR and MASTER_PORT are not set.
    """
    rank, workers = place_of_script()
    if workers == 1:
        return
    if not dist.is_initialized():
        _open(framework, rank, workers)
    found = dist.get_rank(), dist.get_world_size()
    if found != (rank, workers):
        raise ConfigurationError(
            f"{framework} needs a process group with the run's ranks, got rank {found[0]} of {found[1]} in worker "
            f"{rank} of {workers}; pass flockstep.rank() and flockstep.workers() to init_process_group"
        )


def _open(framework: str, rank: int, workers: int) -> None:
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo", rank=rank, world_size=workers, timeout=FOREVER)
        return
    node_spec = enter_run()
    assert node_spec is not None
    if place_on_host()[1] != workers:
        raise ConfigurationError(
            f"{framework} exchanges metrics through torch.distributed, whose address is not known in a run over "
            f"several hosts; set MASTER_ADDR and MASTER_PORT to rank 0's host and a free port there, or start the "
            f"script with torchrun"
        )
    file = Path(node_spec.record) / f".torch-script-{node_spec.run}"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the only way to say that no other host may connect
    dist.init_process_group("gloo", store=private_store(file), rank=rank, world_size=workers, timeout=FOREVER)
    if rank == 0:
        atexit.register(file.unlink, missing_ok=True)


def place_on_host() -> tuple[int, int]:
    """Return the index of this process among the workers of its host, and the number of these workers."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # as flockstep launch and torchrun say it
        return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ["LOCAL_WORLD_SIZE"])
    place = place_from(os.environ)
    return (0, 1) if place is None else (place.local_rank, place.local_workers)


def meet(framework: str) -> None:
    """Wait for all ranks before an operation of torch's process group, because a process in such an operation serves no
    other worker.

    Raises:
        CompositionError: the strategy's workers serve each other between two steps, or cannot wait for each other.
    """
    live = memberships_here()
    if any(one.works_between_steps is not None and one.works_between_steps() for one in live):
        raise CompositionError(
            f"{framework} lets ranks wait for each other between two steps, got a strategy whose workers serve each "
            "other at that time; use a strategy without background tasks, such as all_reduce, ps, local_sgd or gossip"
        )
    if any(one.barrier is not None for one in live):
        barrier()


def broadcast_value(value: T, source: int, framework: str) -> T:
    """Return the value that rank `source` passes: text, a number, None, or lists and dicts of these. All ranks call
    this.

    Raises:
        ConfigurationError: the value has another type.
    """
    if not dist.is_initialized():
        return value
    meet(framework)
    data = torch.frombuffer(bytearray(_encoded(value, framework)), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, source)
    if dist.get_rank() != source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, source)
    decoded: T = msgspec.msgpack.decode(data.numpy().tobytes())
    return decoded


def _encoded(value: object, framework: str) -> bytes:
    try:
        data = msgspec.msgpack.encode(value)
    except (TypeError, NotImplementedError):
        data = b""
    if not data or msgspec.msgpack.decode(data) != value:
        raise ConfigurationError(
            f"{framework} can broadcast text, numbers, None, and lists and dicts of these between ranks, got "
            f"{type(value).__name__}; broadcast tensors with torch.distributed.broadcast"
        )
    return data
