"""What a PyTorch script's process knows of its replica: the shards of all processes, and norms over all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
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
    own = Schema(flat.schema.dtype, tuple(replace(entry, name=f"{entry.name}{_placement(p)}") for entry, p in pairs))
    entries, sizes, offset = list[Entry](), list[int](), 0
    for part, found in enumerate(_gathered(own, local(flat.parameters[0]).device)):
        entries += [
            replace(entry, name=f"{entry.name}, part {part}", offset=offset + entry.offset) for entry in found.entries
        ]
        sizes.append(found.size)
        offset += found.size
        if found.dtype != own.dtype or not found.size:
            raise ConfigurationError(
                f"every process of a replica must hold elements of one dtype, got {found.size} of {found.dtype} on "
                f"process {part} and dtype {own.dtype} on process {mine.rank}; shard the model over fewer processes"
            )
    return ReplicaParts(Schema(own.dtype, tuple(entries)), tuple(sizes))


def _gathered(own: Schema, device: torch.device) -> list[Schema]:
    """Return the schemas of all processes of this replica. They travel as JSON, because a pickle from a socket could
    run code.
    """
    data = torch.frombuffer(bytearray(msgspec.json.encode(own)), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device))
    room = int(max(sizes))
    found = [data.new_empty(room) for _ in sizes]
    dist.all_gather(found, torch.cat([data, data.new_zeros(room - len(data))]))
    texts = [one[: int(size)].cpu().numpy().tobytes() for one, size in zip(found, sizes, strict=True)]
    return [msgspec.json.decode(text, type=Schema) for text in texts]


def _placement(parameter: torch.Tensor) -> str:
    """How a parameter lies on the mesh, for the name under which processes compare it; empty if it is no DTensor."""
    given: Any = parameter
    if local(parameter) is parameter:
        return ""
    mesh = given.device_mesh
    sizes = ", ".join(map(str, mesh.shape))
    placed = ", ".join(map(str, given.placements))
    return f" of shape {tuple(given.shape)} as {placed} on a mesh of {sizes}"


def clip_shards(parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the gradients of a replica by their norm over all of its processes; return the norm before clipping. All
    processes of the replica call this at the same point.
    """
    given = [(p, local(aligned(p.grad, p))) for p in parameters if p.grad is not None]
    size = dist.get_world_size()
    largest = math.isinf(norm_type)
    sums = [torch.zeros((), device=local(one).device) for one in parameters[:1]]
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
