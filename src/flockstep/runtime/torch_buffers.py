"""Makes the tensors that no optimizer trains, such as BatchNorm's statistics, equal on the ranks of a script."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from flockstep.arrays.namespace import to_host
from flockstep.arrays.schema import FlatArray
from flockstep.errors import ConfigurationError, PeerLost
from flockstep.frameworks.torch_dtensors import local
from flockstep.nodes import Worker
from flockstep.runtime.node_metrics import fingerprint
from flockstep.runtime.payloads import receive_pieces, send_pieces
from flockstep.runtime.state import from_bytes, to_bytes

Policy = Literal["mean", "rank0", "local"]
POLICIES: tuple[Policy, ...] = ("mean", "rank0", "local")


def packed(value: Any) -> FlatArray:
    """Return data, such as a `state_dict`, as bytes (uint8) that another rank can read, on any device; raise
    `ConfigurationError` if it contains something that is not data.
    """
    return np.frombuffer(to_bytes(tree_map_only(torch.Tensor, lambda one: local(one).detach().cpu(), value)), np.uint8)


def unpacked(array: FlatArray) -> Any:
    """Return the data whose bytes `packed` has returned on some rank."""
    return from_bytes(to_host(array).tobytes())


class Buffers:
    """The buffers of a module and its frozen parameters, and the policy by which ranks make the buffers equal.

    When training starts, every rank takes rank 0's frozen parameters and, unless the policy is `local`, rank 0's
    buffers. The policy says what becomes of the buffers in the module's `state_dict` at the end. `mean`: floating-point
    buffers become the mean over all ranks, in float64; other buffers (counts) become the buffers of the lowest rank.
    `rank0`: all buffers become the buffers of the lowest rank. `local`: each rank keeps its own. A buffer whose shape
    has changed on some rank since the start stays each rank's own.
    """

    def __init__(self, module: torch.nn.Module, policy: Policy = "mean"):
        if policy not in POLICIES:
            raise ConfigurationError(
                f"buffers must be mean, rank0 or local, got {policy!r}; leave it out for {POLICIES[0]}"
            )
        self.policy = policy
        self._module = module
        self._shapes = {name: local(buffer).shape for name, buffer in module.named_buffers()}

    def __bool__(self) -> bool:
        return self.policy != "local" and bool(self._kept())

    def packed(self) -> FlatArray:
        """Return the names and values (uint8) of the buffers in the `state_dict` that still have their first shape;
        empty with the policy `local`. Sparse buffers are left out.
        """
        dense = {name: tensor for name, tensor in self._kept().items() if tensor.layout == torch.strided}
        same = {name: tensor for name, tensor in dense.items() if self._shapes.get(name) == tensor.shape}
        return packed(same) if self else np.empty(0, np.uint8)

    def take(self, arrays: Mapping[int, FlatArray]) -> list[str]:
        """Set the buffers by the policy, from the packed buffers of several ranks (rank → bytes of `packed()`).

        Returns the names of the buffers that stay each rank's own, because their shape has changed on some rank.
        """
        if not arrays or self.policy == "local":
            return []
        ranks = [unpacked(arrays[rank]) for rank in sorted(arrays) if len(arrays[rank])]
        left = []
        for name, tensor in self._kept().items():
            values = [rank[name] for rank in ranks if name in rank and rank[name].shape == tensor.shape]
            if len(values) == len(arrays):
                averaged = self.policy == "mean" and tensor.is_floating_point() and len(values) > 1
                self._put(name, torch.stack([v.double() for v in values]).mean(0) if averaged else values[0])
            elif tensor.layout == torch.strided:
                left.append(name)
        return left

    def restore(self, array: FlatArray) -> None:
        """Restore the buffers that `packed` returned on this rank."""
        self.take({0: array})

    def values(self) -> dict[str, torch.Tensor]:
        """Return name → buffer for every buffer of the module, whatever the policy; the buffers are not copied.

        This includes buffers that are not in the module's `state_dict`.
        """
        return {name: local(buffer).detach() for name, buffer in self._module.named_buffers()}

    def restore_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Restore the buffers that `values` returned. Their shapes may have changed in training, and a registered
        buffer may be None, as a cache is before the first forward pass.

        Raises:
            ConfigurationError: the module's `state_dict` has a buffer that `values` lacks, or `values` has a buffer
                that the module did not register.
        """
        missing = self._kept().keys() - values.keys()
        strange = values.keys() - self._registered()
        if missing or strange:
            name = min(missing | strange)
            raise ConfigurationError(
                f"buffer {name} is in the {'script' if missing else 'checkpoint'} only, and not in the "
                f"{'checkpoint' if missing else 'script'}; restore the script as it was"
            )
        for name, value in values.items():
            self._put(name, value)

    async def take_first(self, me: Worker) -> None:
        """Take the frozen parameters and the buffers of the lowest rank where those of this rank differ; raise
        `ConfigurationError` if a tensor cannot be copied, or the ranks' policies differ.
        """
        if not me.peers:
            return
        root, held = min(me.rank, *me.peers), self._held()
        own = {name: _described(name, tensor) for name, tensor in held.items()}
        if me.rank == root:
            send_pieces(me, me.peers, "held", packed((self.policy, own)))
            for peer in me.peers:
                with contextlib.suppress(PeerLost):
                    names = unpacked(await receive_pieces(me, peer, "wanted"))
                    send_pieces(me, [peer], "tensors", packed({name: held[name] for name in names}))
            return
        policy, first = unpacked(await receive_pieces(me, root, "held"))
        if policy != self.policy:
            raise ConfigurationError(
                f"all ranks must pass the same buffers argument to distribute, got {self.policy!r} on rank {me.rank} "
                f"and {policy!r} on rank {root}; pass the same value on every rank"
            )
        send_pieces(me, [root], "wanted", packed(self._wanted(own, first, me.rank, root)))
        for name, value in unpacked(await receive_pieces(me, root, "tensors")).items():
            self._put(name, value)

    def _wanted(
        self, own: Mapping[str, _Description], first: Mapping[str, _Description], rank: int, root: int
    ) -> list[str]:
        """Names of the tensors of rank `root` that this rank must take."""
        wanted, buffers = [], self._registered()
        for name in {**first, **own}:
            mine, theirs = own.get(name), first.get(name)
            if mine == theirs:
                continue
            alike = mine is None or theirs is None or mine[1] == theirs[1]
            same_shape = mine is not None and theirs is not None and mine[2] == theirs[2]
            if theirs is None or theirs[0] != "strided" or not alike or not (same_shape or name in buffers):
                in_words = [
                    "missing" if one is None else f"{one[0]} {one[1]} {tuple(one[2])}" for one in (theirs, mine)
                ]
                raise ConfigurationError(
                    f"{name} must be the same on all ranks and cannot be copied from rank {root}, where it is "
                    f"{in_words[0]}, to rank {rank}, where it is {in_words[1]}; build the model with the same values "
                    "on every rank"
                )
            wanted.append(name)
        return wanted

    def _held(self) -> dict[str, torch.Tensor]:
        """The tensors that must be equal at the start, besides the trained parameters."""
        frozen = {name: local(p).detach() for name, p in self._module.named_parameters() if not p.requires_grad}
        return frozen if self.policy == "local" else {**frozen, **self.values()}

    def _kept(self) -> dict[str, torch.Tensor]:
        """The buffers in the module's `state_dict`."""
        kept = self._module.state_dict().keys()
        return {name: buffer for name, buffer in self.values().items() if name in kept}

    def _registered(self) -> set[str]:
        """Names of all buffers of the module, also of those that are None."""
        modules = self._module.named_modules(remove_duplicate=False)
        return {f"{prefix}.{name}".lstrip(".") for prefix, one in modules for name in one._buffers}

    def _put(self, name: str, value: torch.Tensor) -> None:
        """Set a buffer or a frozen parameter; the tensor stays the same object, which other modules may share."""
        prefix, _, last = name.rpartition(".")
        owner = self._module.get_submodule(prefix)
        tensor = getattr(owner, last)
        tensor = None if tensor is None else local(tensor)
        if tensor is None:
            device = next(self._module.parameters(), value).device
            setattr(owner, last, value.to(device, copy=True))
        elif tensor.shape == value.shape and not _overlaps_itself(tensor):
            tensor.detach().copy_(value)
        elif not torch.equal(tensor, new := value.to(tensor.device, tensor.dtype, copy=True)):
            tensor.data = new


_Description = tuple[str, str, list[int], str]
"""Layout, dtype, shape and digest of a tensor."""


def _described(name: str, tensor: torch.Tensor) -> _Description:
    """Describe a tensor, so that tensors with equal descriptions have equal values."""
    layout, kind = str(tensor.layout).removeprefix("torch."), str(tensor.dtype).removeprefix("torch.")
    try:
        dense = tensor.layout == torch.strided
        entries = None if dense else tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        parts = [tensor] if entries is None else [entries.indices(), entries.values()]
        digests = [fingerprint(to_host(part.detach().reshape(-1))) for part in parts]
    except (NotImplementedError, RuntimeError, TypeError):
        raise ConfigurationError(
            f"the values of {name} must be comparable between ranks, got {layout} {kind} on {tensor.device}; give "
            "the tensor values and a dense or sparse layout, or keep it outside of the module"
        ) from None
    return layout, kind, list(tensor.shape), " ".join(digests)


async def all_packed(me: Worker, own: FlatArray) -> dict[int, FlatArray]:
    """Return rank → packed buffers for every living rank; every rank calls this function."""
    me.send_all(me.peers, "buffers", own)
    found = {me.rank: own}
    for rank in me.peers:
        with contextlib.suppress(PeerLost):
            found[rank] = to_host((await me.receive("buffers", rank)).payload)
        if rank not in found and rank not in me.lost:
            raise ConfigurationError(
                f"rank {rank} has called finish() already; call sync_buffers() on every rank before finish()"
            )
    return found


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


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements of a tensor share memory, as after `expand`."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
