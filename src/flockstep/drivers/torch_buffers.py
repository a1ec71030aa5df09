"""Synchronizes a module's buffers, such as the running statistics of BatchNorm, between the ranks of a script."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, PeerLost
from flockstep.frameworks.torch_state import bytes_of, tensor_of
from flockstep.nodes import Worker

Policy = Literal["mean", "rank0", "local"]
POLICIES: tuple[Policy, ...] = ("mean", "rank0", "local")


class Buffers:
    """The buffers in a module's `state_dict`, and the policy by which ranks make them equal.

    `mean`: floating-point buffers become the mean over all ranks, in float64; other buffers (counts) become the buffers
    of the lowest rank. `rank0`: all buffers become the buffers of the lowest rank. `local`: each rank keeps its own.
    """

    def __init__(self, module: torch.nn.Module, policy: Policy = "mean"):
        if policy not in POLICIES:
            raise ConfigurationError(
                f"buffers must be mean, rank0 or local, got {policy!r}; leave it out for {POLICIES[0]}"
            )
        self.policy = policy
        self._module = module

    def __bool__(self) -> bool:
        return self.policy != "local" and bool(self._named())

    def packed(self) -> FlatArray:
        """Return the bytes (uint8) of all buffers in the order of `named_buffers`; empty with the policy `local`."""
        parts = [bytes_of(tensor) for _, tensor in self._named()] if self.policy != "local" else []
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def take(self, packed: Mapping[int, FlatArray]) -> None:
        """Set the buffers by the policy, from the packed buffers of several ranks (rank → bytes of `packed()`).

        Raises:
            ConfigurationError: the ranks' buffers differ in size.
        """
        if not packed or self.policy == "local":
            return
        mine = len(self.packed())
        for rank, other in packed.items():
            if len(other) != mine:
                raise ConfigurationError(
                    f"all ranks must have the same buffers, got {len(other)} bytes on rank {rank} and {mine} on this "
                    "rank; use buffers='local', or register buffers that differ with persistent=False"
                )
        start, arrays = 0, [packed[rank] for rank in sorted(packed)]
        for name, tensor in self._named():
            stop = start + tensor.numel() * tensor.element_size()
            values = [tensor_of(array[start:stop], tensor.dtype, tensor.shape) for array in arrays]
            averaged = self.policy == "mean" and tensor.is_floating_point() and len(values) > 1
            _set(name, tensor, torch.stack([v.double() for v in values]).mean(0) if averaged else values[0])
            start = stop

    def restore(self, packed: FlatArray) -> None:
        """Restore the buffers that `packed` returned on this rank."""
        self.take({0: packed})

    def values(self) -> dict[str, torch.Tensor]:
        """Return name → buffer for every buffer of the module, whatever the policy; the buffers are not copied.

        This includes buffers that are not in the module's `state_dict`.
        """
        return {name: buffer.detach() for name, buffer in self._module.named_buffers()}

    def restore_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Restore the buffers that `values` returned.

        A buffer that is not in the module's `state_dict`, such as a cache, may have another shape in the module, and a
        registered buffer may be None, as a cache is before the first forward pass.

        Raises:
            ConfigurationError: the module's `state_dict` has a buffer that `values` lacks or that has another shape
                there, or `values` has a buffer that the module did not register.
        """
        own, kept = self.values(), self._module.state_dict().keys()
        loose = (own.keys() - kept) | self._unfilled()
        there, here = (
            {name: tuple(one.shape) for name, one in each.items() if name not in loose} for each in (values, own)
        )
        if there != here:
            name = next(name for name in [*there, *here] if there.get(name) != here.get(name))
            raise ConfigurationError(
                f"buffer {name} has the shape {here.get(name, 'of no buffer')} in the script and "
                f"{there.get(name, 'of no buffer')} in the checkpoint; restore the script as it was"
            )
        for name, value in values.items():
            if name in loose and (name not in own or _needs_memory(own[name], value)):
                like = own.get(name, next(self._module.parameters(), value))
                owner, _, last = name.rpartition(".")
                setattr(self._module.get_submodule(owner), last, value.to(like.device, copy=True))
            else:
                _set(name, own[name], value)

    def _unfilled(self) -> set[str]:
        """Names of the registered buffers that are None."""
        return {
            f"{prefix}.{name}" if prefix else name
            for prefix, one in self._module.named_modules()
            for name, buffer in one._buffers.items()
            if buffer is None
        }

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        kept = self._module.state_dict().keys()
        return [(name, buffer.detach()) for name, buffer in self._module.named_buffers() if name in kept]


async def all_packed(me: Worker, packed: FlatArray) -> dict[int, FlatArray]:
    """Return rank → packed buffers for every living rank; every rank calls this function."""
    me.send_all(me.peers, "buffers", packed)
    return {me.rank: packed} | {rank: array for rank in me.peers if (array := await _from(me, rank)) is not None}


def require_separate_statistics(module: torch.nn.Module, workers: int) -> None:
    """Raise `ConfigurationError` if a `SyncBatchNorm` would silently normalize each rank's batches by themselves.

    torch synchronizes the statistics only over a process group of torch.distributed, on GPUs.
    """
    names = [name for name, one in module.named_modules() if isinstance(one, torch.nn.SyncBatchNorm)]
    if workers == 1 or not names:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == workers:
        return
    raise ConfigurationError(
        f"SyncBatchNorm ({names[0] or 'the module itself'}) needs a process group of torch.distributed over all "
        f"{workers} workers, without which torch normalizes by each worker's own batch; call "
        "torch.distributed.init_process_group before distribute (on GPUs), or use BatchNorm, whose running statistics "
        "buffers='mean' averages, or GroupNorm, which has none"
    )


async def first_packed(me: Worker, packed: FlatArray, policy: Policy) -> dict[int, FlatArray]:
    """Return the buffers of rank 0, after a check that all ranks use the same policy.

    Raises:
        ConfigurationError: the policies differ, so ranks would wait for each other forever.
    """
    if me.rank == 0:
        me.send_all(me.peers, "buffers", packed, {"policy": policy})
        return {0: packed}
    first = await me.receive("buffers", 0)
    if first.note["policy"] != policy:
        raise ConfigurationError(
            f"all ranks must pass the same buffers argument to distribute, got {policy!r} on rank {me.rank} and "
            f"{first.note['policy']!r} on rank 0; pass the same value on every rank"
        )
    return {0: to_host(first.payload)}


async def _from(me: Worker, rank: int) -> FlatArray | None:
    """The buffers that a rank sent; None if the rank died."""
    with contextlib.suppress(PeerLost):
        return to_host((await me.receive("buffers", rank)).payload)
    if rank not in me.lost:
        raise ConfigurationError(
            f"rank {rank} has called finish() already; call sync_buffers() on every rank before finish()"
        )
    return None


def _set(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Copy `value` into a buffer; a buffer whose elements share memory (`expand`) must already have that value."""
    if _needs_memory(tensor, value):
        raise ConfigurationError(
            f"the elements of buffer {name} must have separate memory to take other values, got an expanded tensor; "
            "register it with .expand(...).clone(), or with persistent=False"
        )
    if not _is_expanded(tensor):
        tensor.copy_(value)


def _needs_memory(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `value` cannot be copied into a buffer: it has another shape, or the buffer's elements share memory."""
    if tensor.shape != value.shape:
        return True
    return _is_expanded(tensor) and not np.array_equal(bytes_of(tensor), bytes_of(value.to(tensor.dtype)))


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
