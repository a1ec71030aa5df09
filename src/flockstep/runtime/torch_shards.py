"""What a PyTorch script's process knows of its replica: the parameters of all processes, and norms over them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from flockstep.arrays.schema import Entry, Schema, slices
from flockstep.errors import ConfigurationError
from flockstep.frameworks.torch_copies import Copied, Copies
from flockstep.frameworks.torch_dtensors import box_of, local
from flockstep.frameworks.torch_flat import FlatModule, schema_of, trained_in
from flockstep.links.process_groups import FOREVER
from flockstep.runtime.part_group import ReplicaParts
from flockstep.runtime.replica import open_group, replica, require_group


def divided(module: torch.nn.Module) -> tuple[Copies | None, ReplicaParts | None]:
    """Divide the trainable parameters of a module among the processes of this replica, all of which call this.

    A process trains the parameters, and the shards of DTensors, that it alone holds. What several processes hold is
    trained by the one of them that has the fewest elements so far.

    Returns:
        What several processes hold, and what each process trains; None and None if the replica is one process, which
        then holds the whole of every DTensor.

    Raises:
        ConfigurationError: the module cannot be made flat, a DTensor is over other processes, or a process trains no
            element or another dtype.
    """
    mine, named = replica(), trained_in(module)
    if mine.size == 1:
        if any(local(one) is not one for one in named.values()):
            require_group(mine)
        return None, None
    open_group(mine, "gloo")
    placed = {f"{name}{_placement(one)}": (name, one) for name, one in named.items()}
    own = schema_of({key: one for key, (_, one) in placed.items()})
    schemas = _gathered(own, local(next(iter(named.values()))).device)
    holders = defaultdict[str, list[int]](list)
    for part, schema in enumerate(schemas):
        for entry in schema.entries:
            holders[entry.name].append(part)
    owners = _owners(schemas, holders)
    trained = [
        schema.only({key for key, owner in owners.items() if owner == part}) for part, schema in enumerate(schemas)
    ]
    return _copies(placed, holders, owners), _parts(trained, mine.rank)


def _owners(schemas: Sequence[Schema], holders: Mapping[str, list[int]]) -> dict[str, int]:
    """Return the process that trains each parameter or shard."""
    found, sizes = {}, [0] * len(schemas)
    for alone in (True, False):
        for name, among in holders.items():
            if (len(among) == 1) is alone:
                owner = found[name] = min(among, key=sizes.__getitem__)
                sizes[owner] += next(entry.size for entry in schemas[owner].entries if entry.name == name)
    return found


def _copies(
    placed: Mapping[str, tuple[str, torch.nn.Parameter]],
    holders: Mapping[str, list[int]],
    owners: Mapping[str, int],
) -> Copies:
    """Return what this process holds together with others."""
    everyone, sets = tuple(range(dist.get_world_size())), dict[tuple[Any, ...], dict[str, torch.nn.Parameter]]()
    together = sorted({tuple(one) for one in holders.values() if len(one) > 1})
    groups = {  # every process creates all of them
        among: None if among == everyone else dist.new_group(list(among), timeout=FOREVER) for among in together
    }
    for key, (name, one) in sorted(placed.items()):  # in the same order everywhere
        if (among := tuple(holders[key])) in groups:
            sets.setdefault((among, owners[key], str(one.dtype)), {})[name] = one
    return Copies([Copied(sets[key], key[1], groups[key[0]]) for key in sorted(sets)])


def _parts(trained: Sequence[Schema], rank: int) -> ReplicaParts:
    """Return what the processes of a replica train; `rank`: number of this process."""
    entries, sizes, offset = list[Entry](), list[int](), 0
    for part, found in enumerate(trained):
        entries += [
            replace(entry, name=f"{entry.name}, part {part}", offset=offset + entry.offset) for entry in found.entries
        ]
        sizes.append(found.size)
        offset += found.size
        if found.dtype != trained[rank].dtype or not found.size:
            raise ConfigurationError(
                f"every process of a replica must train elements of one dtype, got {found.size} of {found.dtype} on "
                f"process {part} and dtype {trained[rank].dtype} on process {rank}; shard the model over fewer "
                "processes"
            )
    return ReplicaParts(Schema(trained[rank].dtype, tuple(entries)), tuple(sizes))


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


def largest(number: int) -> int:
    """Return the largest of a number over the processes of this replica, all of which call this at one point."""
    given: Any = dist  # not all of what it offers is declared
    device = "cpu" if "cpu" in given.get_backend_config() else "cuda"
    found = torch.tensor([number], device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def fragments(flat: FlatModule, count: int) -> list[slice]:
    """Return contiguous slices of the flat array, one for each of `count` equal parts of the whole model."""
    whole = sum(one.numel() for one in flat.trained.values())
    borders, stops, offset = [part.stop for part in slices(whole, count)], [0] * count, 0
    for name, one in flat.trained.items():
        if name not in flat.elsewhere:
            for index, border in enumerate(borders):
                stops[index] += _before(one, border - offset)
        offset += one.numel()
    return [slice(*pair) for pair in pairwise([0, *stops])]


def _before(parameter: torch.Tensor, number: int) -> int:
    """How many of the first `number` elements of a parameter this process holds."""
    own, box, found = local(parameter).shape, box_of(parameter), 0
    if not own:
        return int(number > 0)
    for dim, start in enumerate(box.offsets):
        row, number = divmod(number, math.prod(box.whole[dim + 1 :]))
        found += min(max(row - start, 0), own[dim]) * math.prod(own[dim + 1 :])
        if not start <= row < start + own[dim]:
            break
    return found


def _placement(parameter: torch.Tensor) -> str:
    """How a parameter lies on the mesh, and which shard this process holds, for the name under which processes compare
    it; empty if it is no DTensor.
    """
    given: Any = parameter
    if local(parameter) is parameter:
        return ""
    mesh = given.device_mesh
    sizes = ", ".join(map(str, mesh.shape))
    placed = ", ".join(map(str, given.placements))
    where = zip(mesh.get_coordinate(), given.placements, strict=True)
    shard = ", ".join(str(index) for index, how in where if not how.is_replicate()) or "whole"
    return f" of shape {tuple(given.shape)} as {placed} on a mesh of {sizes} (shard {shard})"


def clip_shards(
    flat: FlatModule, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> torch.Tensor:
    """Clip the gradients of a replica by their norm over all of its processes; return the norm before clipping. All
    processes of the replica call this at the same point.
    """
    flat.align()
    elsewhere, largest = set(map(id, flat.elsewhere.values())), math.isinf(norm_type)
    given = [(id(one), local(one.grad)) for one in parameters if one.grad is not None]
    sums = [torch.zeros((), device=local(one).device) for one in parameters[:1]]
    for key, own in given:
        if key not in elsewhere:
            norm = torch.linalg.vector_norm(own, norm_type, dtype=torch.float32)
            sums.append(norm if largest else norm**norm_type)
    total = torch.stack(sums).max() if largest else torch.stack(sums).sum()
    dist.all_reduce(total, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    total = total if largest else total ** (1 / norm_type)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, own in given:
        own.mul_(factor.to(own.dtype))
    return total
