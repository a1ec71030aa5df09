"""What a PyTorch script's process knows of its replica: the shards of all processes, and norms over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from flockstep.arrays.schema import Entry, Schema
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_flat import FlatModule, aligned, local
from flockstep.runtime.part_group import ReplicaParts
from flockstep.runtime.replica import open_group, replica, require_group


def parts_of(flat: FlatModule) -> ReplicaParts | None:
    """Return the shards of all processes of this replica; None if the replica is one process, which then holds the
    whole of every DTensor.

    Raises:
        ConfigurationError: a DTensor is over other processes, or a process holds no element or another dtype.
    """
    mine = replica()
    if flat.sharded:
        require_group(mine)
    if mine.size == 1:
        return None
    open_group(mine, "gloo")
    pairs = zip(flat.schema.entries, flat.parameters, strict=True)
    own = [(f"{entry.name}{_placement(p)}", entry.shape, entry.dtype) for entry, p in pairs]
    found: list[Any] = [None] * mine.size
    dist.all_gather_object(found, (flat.schema.dtype, own))
    entries, sizes, offset = list[Entry](), list[int](), 0
    for part, (dtype, tensors) in enumerate(found):
        start = offset
        for name, shape, narrow in tensors:
            entries.append(Entry(f"{name}, part {part}", shape, offset, narrow))
            offset += entries[-1].size
        sizes.append(offset - start)
        if dtype != flat.schema.dtype or not sizes[-1]:
            raise ConfigurationError(
                f"every process of a replica must hold elements of one dtype, got {sizes[-1]} of {dtype} on process "
                f"{part} and dtype {flat.schema.dtype} on process {mine.rank}; shard the model over fewer processes"
            )
    return ReplicaParts(Schema(flat.schema.dtype, tuple(entries)), tuple(sizes))


def _placement(parameter: torch.Tensor) -> str:
    """How a parameter lies on the mesh, for the name under which processes compare it; empty if it is no DTensor."""
    given: Any = parameter
    if local(parameter) is parameter:
        return ""
    mesh = given.device_mesh
    sizes = ", ".join(map(str, mesh.shape))
    placed = ", ".join(map(str, given.placements))
    return f" of shape {tuple(given.shape)} as {placed} on a mesh of {sizes}"


def clip_shards(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the gradients of a replica by their norm over all of its processes; return the norm before clipping. All
    processes of the replica call this at the same point.
    """
    given = [(p, local(aligned(p.grad, p))) for p in parameters if p.grad is not None]
    size = dist.get_world_size()
    largest = math.isinf(norm_type)
    sums = [torch.zeros((), device=own.device) for _, own in given[:1]]
    for parameter, own in given:
        norm = torch.linalg.vector_norm(own, norm_type, dtype=torch.float32)
        sums.append(norm if largest else norm**norm_type / _copies(parameter, size))
    total = torch.stack(sums).max() if largest else torch.stack(sums).sum()
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    total = total if largest else total ** (1 / norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, own in given:
        own.mul_(factor.to(own.dtype))
    return total


def _copies(parameter: torch.Tensor, size: int) -> int:
    """Number of processes, among `size`, that hold the same shard as this process."""
    given: Any = parameter
    if local(parameter) is parameter:
        return size
    placed = zip(given.device_mesh.shape, given.placements, strict=True)
    return size // int(math.prod(n for n, how in placed if not how.is_replicate()))
