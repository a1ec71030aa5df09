"""The processes of a script that hold one replica of the model together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flockstep.errors import ConfigurationError, MissingDependency
from flockstep.runtime.node_spec import (
    ask_for_replicas,
    enter_run,
    joining_run,
    place_of_replica,
    refuse,
    require_own_process,
    spec_from_environment,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_shapes: dict[str, int] = {}
"""Name of each dimension of the meshes of this process's replica → the number of processes along the dimension."""


@dataclass(frozen=True)
class Replica:
    """The replica that this process holds a part of."""

    index: int
    """Number of the replica, from 0."""
    rank: int
    """Number of this process among those of the replica, from 0."""
    size: int
    """Number of processes of the replica."""
    count: int
    """Number of replicas, which the strategy coordinates."""

    def mesh(
        self, names: Sequence[str] = ("shard",), shape: Sequence[int] | None = None, *, backend: str | None = None
    ) -> DeviceMesh:
        """Return a `DeviceMesh` over the processes of the replica, for `fully_shard` and `parallelize_module`.

        The first call opens the default process group of torch.distributed over these processes, and on GPUs selects
        the device whose number is the process's on its host.

        Args:
            names: name of each dimension.
            shape: number of processes along each dimension; None for one dimension with all processes.
            backend: backend of the process group; None for NCCL if there is a GPU, otherwise Gloo. With "gloo" the mesh
                is over CPUs.

        Raises:
            ConfigurationError: the shape does not cover the replica, or the script has opened a process group of other
                processes.
            MissingDependency: PyTorch is not installed.
        """
        sizes = (self.size,) if shape is None else tuple(shape)
        total = 1
        for one in sizes:
            total *= one
        if total != self.size or len(sizes) != len(names):
            raise ConfigurationError(
                f"the shape of a replica's mesh must have a number for each of the names {tuple(names)}, whose product "
                f"is the replica's {self.size} processes, got {sizes}; pass another shape, or start flockstep launch "
                f"with --replica-size {total}"
            )
        try:
            import torch
        except ModuleNotFoundError:
            raise MissingDependency.of("PyTorch", "torch", "flockstep.replica().mesh") from None
        from torch.distributed.device_mesh import init_device_mesh

        cuda = torch.cuda.is_available() and backend != "gloo"
        with joining_run("replica().mesh"):
            open_group(self, backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo"), cuda)
        _shapes.update(zip(names, sizes, strict=True))
        return init_device_mesh("cuda" if cuda else "cpu", sizes, mesh_dim_names=tuple(names))

    def place(self, dimension: str) -> tuple[int, int]:
        """Return the number of this process among all processes of the run that read different data, if those along
        `dimension` of the replica's mesh do, and the number of these processes.

        Raises:
            ConfigurationError: the replica has no mesh with such a dimension.
        """
        if dimension not in _shapes:
            raise ConfigurationError(
                f"among must be a dimension of the replica's mesh, one of {', '.join(_shapes) or 'none so far'}, got "
                f"{dimension!r}; call flockstep.replica().mesh() before flockstep.shard"
            )
        names, rank = list(_shapes), self.rank
        for name in reversed(names[names.index(dimension) + 1 :]):  # the last dimension changes fastest
            rank //= _shapes[name]
        along = _shapes[dimension]
        return self.index * along + rank % along, self.count * along


def replica(size: int | None = None, *, over_hosts: bool = False) -> Replica:
    """Return the replica that this process holds a part of, with `index`, `rank`, `size` and `mesh()`.

    `flockstep launch -n 8 --replica-size 4` starts two replicas of four processes. Worker r × 4 + p, as `rank()` counts
    them, is process p of replica r. Without `--replica-size`, and in a script that runs alone, a replica is one
    process.

    Args:
        size: number of processes of a replica, for a script that torchrun, mpirun or srun starts; given in the first
            call, before `flockstep.distribute`. None for the number that flockstep launch or an earlier call was given.
        over_hosts: let the processes of one replica run on several hosts, as `--replica-over-hosts` does.

    Raises:
        ConfigurationError: the script of a launched run has started this process, the size does not divide the number
            of processes, or the run has replicas of another size.
    """
    require_own_process("replica")
    if size is not None:
        try:
            ask_for_replicas(size, over_hosts)
        except ConfigurationError as error:
            refuse(error, spec_from_environment())
            raise
    return Replica(*place_of_replica())


def open_group(replica: Replica, backend: str, cuda: bool = False) -> None:
    """Open the default process group over the processes of a replica, unless it is open.

    Raises:
        ConfigurationError: the open group has other processes, or the replica is on several hosts and no group is open.
    """
    import torch
    import torch.distributed

    from flockstep.links.process_groups import FOREVER, private_store

    dist: Any = torch.distributed  # not all of what it offers is declared
    if not dist.is_initialized():
        spec = enter_run()
        if replica.size > 1 and spec is not None and spec.replica_over_hosts:
            raise ConfigurationError(
                "flockstep opens the process group of a replica only within one host, because its links are not "
                'encrypted; for a replica over hosts call torch.distributed.init_process_group("gloo", '
                'init_method="tcp://HOST:PORT", rank=replica.rank, world_size=replica.size) before '
                "replica.mesh(), with an address of the host of the replica's first process"
            )
        if cuda and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the only way to say that no other host may connect
        if spec is None or replica.size == 1:
            store = dist.HashStore()
        else:
            store = private_store(Path(spec.directory) / f"replica-{replica.index}")
        dist.init_process_group(backend, store=store, rank=replica.rank, world_size=replica.size, timeout=FOREVER)
    require_group(replica)


def require_group(replica: Replica) -> None:
    """Raise `ConfigurationError` unless the default process group has the processes of the replica."""
    import torch.distributed as dist

    found = dist.get_rank(), dist.get_world_size()
    if found != (replica.rank, replica.size):
        raise ConfigurationError(
            f"DTensors must be over the mesh of the process's replica, process {replica.rank} of {replica.size}, got a "
            f"process group with rank {found[0]} of {found[1]}; leave out init_process_group and use "
            "flockstep.replica().mesh(), and give flockstep launch --replica-size the number of processes"
        )
